r"""Labelled answers in the notations of seven benchmarks, and numbers and units as datasets and models write them.

One pair a line, as in `tests/grading_pairs.py`. The pairs are our own. They were written before the grader was changed to them,
from what the answers mean and not from what the grader did.
"""

from __future__ import annotations

TABLE = r"""
# AIME
033 === 33
33 === 033
204 === 204
204 === \text{204}
204 === 204.0
204 === \mathbf{204}
204 === m+n=204
204 === 2.04 \times 10^2
204 === 2.04e2
204 =/= 2.04e3
204 =/= 203
204 =/= 24
204 =/= 204e
204 =/= 204k
204 =/= 204\pi
73 === \frac{146}{2}
73 === 73^\circ
73 === 73 \text{ degrees}
73 === 73 degrees
73 === 73 ways
73 === 73 \text{ ways}
73 === 73 square units
73 === 73 \text{ square units}
73 =/= 73 or 74
73 =/= 73 million
73 =/= 73 dozen
73 =/= 73!
73 =/= 73 factorial
73 =/= 73 thousandths
73 =/= 73 pi
73 =/= 73 halves
73 =/= 73 squared
73 =/= 72 degrees
25 =/= 5
0 === 000
0 =/= 1e-9
0 =/= 10^{-12}
1000 === 1e3
1000 =/= 1e2
1000 =/= 3e
# AMC
27.0 === 27
27.0 === \frac{54}{2}
27.0 =/= 27.5
27 === \textbf{27}
27 === 27 cm
27 === 27\,\text{cm}^2
27 === 27 \mathrm{~cm}^{3}
27 === 27 minutes
27 === 27 mph
27 === 27 \text{ miles per hour}
27 === 27 miles per hour
27 =/= 27x
27 =/= 27 x
27 =/= 27 n
27 =/= 27 xy
27 =/= 27 \sin x
27 =/= 27 sin x
27 =/= 27 log 2
\textbf{(C)} === C
\textbf{(C)} =/= D
D === \text{D}
1{,}296{,}000 === 1296000
3.5 === \frac{7}{2}
3.5 === 3\frac{1}{2}
\frac{3}{2} === 1.5
\frac{2}{3} =/= 0.67
-4.5 === -\frac{9}{2}
36 === 36 \text{ apples}
18 === 18 dollars
18 === 18 USD
18 === \$18
18 === 18 dollars.
18 === 18\text{ dollars}
18 =/= 1.8 dollars
18 =/= 19 dollars
366 === 366 downloads
366 =/= 365 downloads
2 === 2 bolts
2 === 2 \text{ bolts}
2 =/= 3 bolts
0.05 === 5 \times 10^{-2}
0.05 === 5e-2
0.05 === 5E-2
0.05 =/= 5e-3
# MATH500
\left( 3, \frac{\pi}{2} \right) === (3, \pi/2)
\left( 3, \frac{\pi}{2} \right) =/= (3, \pi)
p - q === -q + p
p - q =/= q - p
\frac{14}{3} === 14/3
\frac{14}{3} === 4\frac{2}{3}
\frac{14}{3} =/= 4.67
\text{Evelyn} === Evelyn
\text{Evelyn} =/= Angela
90^\circ === 90
90^\circ === 90 degrees
90^\circ =/= 90\pi
3\sqrt{13} === \sqrt{117}
3\sqrt{13} === 3\sqrt{13}\text{ cm}
3\sqrt{13} === 3\sqrt{13} \text{ units}
3\sqrt{13} =/= 3\sqrt{13} m
3\sqrt{13} =/= 3\sqrt{13} x
6 - 5i === 6-5 i
6 - 5i =/= 6 + 5i
x^3+3x-6 === 3x + x^3 - 6
x^3+3x-6 =/= x^3+3x+6
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} === \begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \\ \frac{5}{3} \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} =/= \begin{pmatrix} 1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
\$18.90 === 18.90 \text{ dollars}
\$18.90 === 18.9 dollars
\$18.90 =/= 18.95 dollars
\text{June 20} === June 20
\text{June 20} =/= June 21
(6,31,-1) === (6, 31, -1)
(6,31,-1) =/= (6, 31, 1)
1,-2 === -2, 1
1,-2 =/= -1, 2
15\mbox{ cm}^2 === 15
15\mbox{ cm}^2 === 15\text{ cm}^2
15\mbox{ cm}^2 === 15 cm^2
15\mbox{ cm}^2 === 15\text{ square centimeters}
15\mbox{ cm}^2 =/= 225
15\mbox{ cm}^2 =/= 16\text{ cm}^2
864 \mbox{ inches}^2 === 864
864 \mbox{ inches}^2 === 864 square inches
864 \mbox{ inches}^2 =/= 864^2
5.4 \text{ cents} === 5.4
5.4 \text{ cents} === 5.4 cents
5.4 \text{ cents} =/= 5.4 \text{ dollars}
11\sqrt2 === 11\sqrt{2}
11\sqrt2 =/= 112
x \in [-2,7] === [-2,7]
x \in [-2,7] =/= (-2,7)
1 \pm \sqrt{19} === 1+\sqrt{19}, 1-\sqrt{19}
1 \pm \sqrt{19} =/= 1+\sqrt{19}
3R^2 === 3 R^2
3R^2 =/= 3
3R^2 =/= 9R^2
2k+2 === 2(k+1)
2k+2 =/= 2k
145^\circ === 145
\frac{243}{625} === 0.3888
\frac{243}{625} =/= 0.39
\frac{270}{7}\text{ degrees} === \frac{270}{7}
\frac{270}{7}\text{ degrees} === \frac{270}{7}^\circ
\frac{270}{7}\text{ degrees} =/= \frac{27}{7}
10\text{ cm} === 10 cm
10\text{ cm} =/= 10 km
2m === 2 m
2m =/= 2
2m =/= m
\pi === \pi \text{ square units}
18\pi \text{ cm}^2 === 18\pi
18\pi \text{ cm}^2 =/= 18
2000 === 2000 calories
2000 === 2e3 calories
12 === 12\text{ in}^3
12 === 12 cubic inches
# Omni-MATH
\frac{2^{2005}+1}{3 \cdot 2^{2006}} =/= \frac{1}{3 \cdot 2^{2006}}
\frac{2^{2005}+1}{3 \cdot 2^{2006}} =/= \frac{1}{6}
\frac{2^{205}+1}{3 \cdot 2^{206}} =/= \frac{1}{3 \cdot 2^{206}}
\frac{3^{120}+1}{4 \cdot 3^{121}} =/= \frac{1}{4 \cdot 3^{121}}
\frac{2^{50}+1}{3 \cdot 2^{51}} =/= \frac{1}{3 \cdot 2^{51}}
\frac{2^{205}+1}{3 \cdot 2^{206}} === \frac{1+2^{205}}{6 \cdot 2^{205}}
2^{1009} === 2 \cdot 2^{1008}
2^{1009} =/= 2^{1008}
2^{2021}-1 === 2^{2021} - 1
2^{2021}-1 =/= 2^{2021}
2^{2021}-1 =/= 2^{2021}+1
10^{20} =/= 10^{20}+1
10^{20} === 1e20
\frac{1}{2^{100}} =/= \frac{1}{2^{101}}
1-\frac{1}{2^{100}} =/= 1
1-\frac{1}{2^{100}} =/= 1-\frac{1}{2^{99}}
\sqrt{10^{40}+1} =/= 10^{20}
(0,\frac{1}{2^{60}}) =/= (0,\frac{1}{2^{61}})
\{1,\frac{1}{10^{40}}\} =/= \{1,\frac{1}{10^{41}}\}
1+10^{-20} =/= 1+10^{-21}
n-1 === -1+n
n-1 =/= n+1
n-1 =/= n
f(x)=x+1 === x+1
f(x)=x+1 =/= x-1
\binom{2n}{n} === \frac{(2n)!}{n!n!}
\binom{2n}{n} =/= \binom{2n}{n-1}
\left\lfloor \frac{n}{2} \right\rfloor === \lfloor n/2 \rfloor
\left\lfloor \frac{n}{2} \right\rfloor =/= \frac{n}{2}
\left\lceil \frac{n}{2} \right\rceil =/= \left\lfloor \frac{n}{2} \right\rfloor
\sqrt{2}+1 === \frac{1}{\sqrt{2}-1}
\sqrt{2}+1 =/= \sqrt{2}-1
2 m === 2m
m g === m g
m g === g m
m g =/= m
m g =/= g
x^2 m === m x^2
x^2 m =/= x^2
k m === m k
k m =/= k
n m =/= n
\frac{a}{b} c === \frac{ac}{b}
\frac{a}{b} c =/= \frac{a}{b}
2^n t =/= 2^n
n! h =/= n!
a b d =/= a b
\frac{n(n+1)}{2} s =/= \frac{n(n+1)}{2}
\text{Yes} =/= \text{No}
\frac{1}{3} =/= 0.333
\frac{1}{3} === 0.3333333
# OlympiadBench
2 \pi === 2\pi
2 \pi =/= 6.28
\frac{1}{m} t === \frac{t}{m}
\frac{1}{m} t =/= \frac{1}{m}
\pi r^2 h === \pi h r^2
\pi r^2 h =/= \pi r^2
\frac{1}{\sqrt{2}} c === \frac{c}{\sqrt{2}}
\frac{1}{\sqrt{2}} c =/= \frac{1}{\sqrt{2}}
[-\sqrt{3},0) === [-\sqrt{3}, 0)
[-\sqrt{3},0) =/= [-\sqrt{3}, 0]
0,1 === 1, 0
0,1 =/= 0
\sqrt{1/n} === \frac{1}{\sqrt{n}}
\sqrt{1/n} === 1/\sqrt n
\sqrt{1/n} === n^{-1/2}
\sqrt{1/n} =/= \frac{1}{n}
\sqrt{1/n} =/= \sqrt{n}
\sqrt{\frac{a}{b}} === \frac{\sqrt{a}}{\sqrt{b}}
\sqrt{\frac{a}{b}} =/= \frac{a}{b}
\sqrt{ab} === \sqrt{a}\sqrt{b}
\sqrt{x^2} =/= x
\sqrt{x^2} === |x|
|x| =/= x
2 \sqrt{5} \mathrm{~cm} === 2\sqrt{5}
2 \sqrt{5} \mathrm{~cm} === 2\sqrt{5}\text{ cm}
2 \sqrt{5} \mathrm{~cm} =/= 2\sqrt{5}\text{ m}
2 \sqrt{5} \mathrm{~cm} =/= \sqrt{5}
20 \mathrm{~km} === 20
20 \mathrm{~km} === 20 km
20 \mathrm{~km} =/= 20 m
\left(\frac{1}{2}, \frac{3}{4}\right) === (0.5, 0.75)
\{1,3,5\} === \{5,3,1\}
\{1,3,5\} =/= \{1,3\}
f(x)=2x === 2x
45^{\circ} === 45 degrees
5 === 5 \mathrm{~m}
5 === 5 m
5 m === 5
5 m =/= 5 km
5 =/= 5 m n
5 =/= 5 r
\frac{2}{3} m =/= \frac{2}{3}
5 \text{ m/s} === 5
5 \text{ m/s} === 5 m/s
5 \text{ m/s} === 5 \mathrm{~m} / \mathrm{s}
5 \text{ m/s} =/= 5 \text{ km/h}
9.8 === 9.8 m/s^2
9.8 === 9.8 \text{ m/s}^2
9.8 === 9.8 \mathrm{~m} / \mathrm{s}^{2}
9.8 =/= 9.81 m/s^2
# Minerva
4.5e33 === 4.5 \times 10^{33}
4.5e33 === 4.5e+33
4.5e33 === 4.5E33
4.5e33 === 4.5 \cdot 10^{33}
4.5e33 === 45 \times 10^{32}
4.5e33 === $4.5 \times 10^{33}$
4.5e33 === 4.5 \times 10^{33} \text{ erg}
4.5e33 === 4.5e33 \mathrm{~erg}
4.5e33 =/= 4.5 \cdot e \cdot 33
4.5e33 =/= 4.5 \times 10^{32}
4.5e33 =/= 4.51 \times 10^{33}
4.5e33 =/= 4.5
6.02e23 === 6.02\times 10^{23}
6.02\times 10^{23} === 6.02e23
6.02\times 10^{23} =/= 6.02e22
1e3 === 1000
1e3 =/= 3e
2.19e6 === 2190000
2.19e6 === 2.19 \times 10^6
5e-05 === 0.00005
5e-05 === \frac{1}{20000}
5e-05 === 5 \times 10^{-5}
5e-05 =/= 5e-06
-7e-6 === -7 \times 10^{-6}
-7e-6 === -0.000007
-7e-6 =/= 7e-6
1e+16 === 10^{16}
1e+16 =/= 10^{15}
2e === 2 \cdot e
2e === 2 e
2e =/= 2
2e =/= 200
e^2 === e \cdot e
2e^3 === 2 e^{3}
2e^3 =/= 2000
2e^{3x} =/= 2e3
I(0) e^{-\frac{t}{R C}} === I(0) e^{-t/(RC)}
I(0) e^{-\frac{t}{R C}} =/= I(0) e^{-t}
\arcsin{1.3 \sin{\theta_w}} === \arcsin(1.3\sin\theta_w)
\frac{1}{2} m v^2 === \frac{m v^2}{2}
\frac{1}{2} m v^2 =/= m v^2
\frac{1}{2} m g h =/= \frac{1}{2} m g
\frac{v^2}{2 g} === \frac{v^2}{2g}
\frac{v^2}{2 g} =/= \frac{v^2}{2}
\frac{m}{s} =/= m
\omega t =/= \omega
c t =/= c
v t === t v
v t =/= v
4080 === 4080 \text{ K}
4080 === 4080 K
4080 === 4.08e3
4080 =/= 4.08e2
13.6 === 13.6 \text{ eV}
13.6 === 13.6 eV
13.6 =/= 13.6 e
1 / 3 === \frac{1}{3}
+1 === 1
0.0005 === 5e-4
0.0005 === 5 \times 10^{-4}
0.0005 =/= 0.0006
(1e3, 2e3) === (1000, 2000)
(1e3, 2e3) =/= (1000, 3000)
1e3, 2e3 === 1000, 2000
\boxed{} =/= 5
"""
