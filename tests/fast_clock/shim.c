/* libfaketime 0.9.10 leaves sem_clockwait and pthread_cond_clockwait alone, in which every timed lock of Python waits: their
   deadlines are those of the fast clock, and the kernel has another. Preloaded before libfaketime, this file translates them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

static double speed(void) {
  const char *clock = getenv("FAKETIME");
  return clock ? atof(strchr(clock, 'x') + 1) : 1;
}

static double seconds(const struct timespec *t) { return t->tv_sec + t->tv_nsec / 1e9; }

/* Return the deadline of the kernel's clock that is as far away, for a clock that runs FAKETIME="+0 xSPEED" as fast. */
static struct timespec real_deadline(clockid_t clock, const struct timespec *deadline) {
  struct timespec fast, real;
  clock_gettime(clock, &fast);
  syscall(SYS_clock_gettime, clock, &real);
  double left = (seconds(deadline) - seconds(&fast)) / speed(), whole = seconds(&real) + (left > 0 ? left : 0);
  real.tv_sec = (time_t)whole;
  real.tv_nsec = (long)((whole - real.tv_sec) * 1e9);
  return real;
}

int sem_clockwait(sem_t *sem, clockid_t clock, const struct timespec *deadline) {
  int (*next)(sem_t *, clockid_t, const struct timespec *) = dlsym(RTLD_NEXT, "sem_clockwait");
  struct timespec real = real_deadline(clock, deadline);
  return next(sem, clock, &real);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *deadline) {
  int (*next)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *) =
      dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  struct timespec real = real_deadline(clock, deadline);
  return next(cond, mutex, clock, &real);
}

/* libfaketime rounds 10 ms, with which gloo's threads poll, to 0 from x11 on, and they would keep a processor busy. */
int epoll_wait(int file, struct epoll_event *events, int most, int timeout) {
  int real = timeout > 0 ? (int)(timeout / speed()) : timeout;
  return (int)syscall(SYS_epoll_pwait, file, events, most, timeout > 0 && real < 1 ? 1 : real, NULL, 0);
}
