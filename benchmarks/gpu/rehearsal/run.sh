#!/bin/bash
# Run a command as on the machine that is lent for the GPU check: loopback only, a hostname that nothing resolves, one fake GPU.
# Needs root. Called by `make gpu-rehearsal`.
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here:$(cd "$here/../../.." && pwd)"
exec unshare --net --uts bash -c 'hostname gpubox && ip link set lo up && exec "$@"' bash "$@"
