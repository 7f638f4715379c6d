r"""Labelled answers: what a careful marker would say of the content of a box, by kind of answer.

One pair a line: `gold === answer` is right, `gold =/= answer` is wrong. Written for this project. What can be argued over is
labelled as docs/rewards.md says: a percentage may stand for its number with or without the sign, a unit that the gold answer
does not ask for may be named, and another one than its own where the quantity is the same; decimals count where they agree
to six places.
"""

# ruff: noqa: RUF001  (signs that look like others are part of the task)

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """A labelled answer.

    Attributes:
        kind: Heading of its section in the table.
    """

    kind: str
    gold: str
    answer: str
    right: bool


TABLE = r"""
# integers
42 === 42
42 === 42.0
42 === +42
42 === 042
42 === \text{42}
42 === $42$
42 === 42.
42 === x = 42
42 === n=42
42 === 6 \cdot 7
42 === 84/2
42 === \dfrac{84}{2}
42 === \mathbf{42}
42 === {42}
42 === (42)
42 === 40 + 2
-3 === -3
-3 === - 3
-3 === −3
-3 =/= 3
-3 === -\frac{6}{2}
1000 === 1,000
1000 === 1{,}000
1000 === 1\,000
1000 === 1 000
1000 === 10^3
1000 === 10^{3}
1234567 === 1,234,567
1234567 === 1\,234\,567
1234567 =/= 1,234,568
1000 =/= 1,00
0 === 0
0 === -0
0 === 0.0
120 === 5!
120 =/= 6!
42 =/= 43
42 =/= -42
42 =/= 4.2
42 =/= 24
42 =/= 420
42 =/= 4 2
42 =/= 1 2 3 42
42 =/= 42 1
42 =/= 41, 42
42 =/= 42 or 43
42 =/= \text{six times 7 = 42}
42 =/= six times 7 = 42
42 =/= \infty
42 =/= 42x
42 =/= 42i
42 =/= \sqrt{42}
42 =/= \emptyset
42 =/= ?
2048 === 2^{11}
2048 === 2^11
2048 =/= 2^{12}
1024 =/= 2^{10}+1
# fractions
\frac{1}{2} === \frac12
\frac{1}{2} === \dfrac{1}{2}
\frac{1}{2} === \tfrac{1}{2}
\frac{1}{2} === 1/2
\frac{1}{2} === 0.5
\frac{1}{2} === .5
\frac{1}{2} === 0.50
\frac{1}{2} === \frac{2}{4}
\frac{1}{2} === 2^{-1}
\frac{1}{2} === \frac{\sqrt{4}}{4}
\frac{1}{2} === x = \frac{1}{2}
\frac{1}{2} === P = 1/2
\frac{1}{2} =/= \frac{1}{3}
\frac{1}{2} =/= -\frac{1}{2}
\frac{1}{2} =/= 2
\frac{1}{2} =/= 12
\frac{1}{2} =/= 1, 2
\frac{1}{2} =/= 0.51
-\frac{3}{4} === \frac{-3}{4}
-\frac{3}{4} === \frac{3}{-4}
-\frac{3}{4} === -0.75
-\frac{3}{4} =/= \frac{3}{4}
\frac{7}{3} === 2\frac{1}{3}
\frac{7}{3} === 2 \frac{1}{3}
\frac{7}{3} === 2 1/3
\frac{7}{3} === 7/3
\frac{7}{3} =/= 2.33
\frac{7}{3} =/= \frac{2}{3}
\frac{1}{3} === 0.\overline{3}
\frac{1}{3} =/= 0.3
\frac{1}{3} =/= 0.33
\frac{1}{3} =/= 0.34
\frac{5}{11} =/= 0.45
\frac{22}{7} =/= \pi
\frac{1}{2004!} === \frac{1}{2004!}
\frac{1}{2004!} === 1/2004!
\frac{1}{2004!} =/= \frac{1}{2006!}
\frac{1}{2004!} =/= 0
\frac{1}{10^{30}} =/= \frac{1}{10^{31}}
10^{-30} =/= 10^{-31}
10^{-30} === \frac{1}{10^{30}}
\frac{1}{3^{50}} =/= \frac{1}{3^{51}}
\frac{1}{3^{50}} === 3^{-50}
3:8 === 3:8
3:8 =/= 8:3
1:2 === 1 : 2
# decimals
3.14 === 3.14
3.14 === 3.140
3.14 =/= 3.15
3.14 =/= 3.1
3.14 =/= \pi
0.125 === \frac18
0.125 === 1/8
0.125 === 1.25 \times 10^{-1}
0.125 =/= 1.25
0.125 =/= 125
1.5 === 1.50
1.5 === \frac{3}{2}
2.5\times10^{4} === 25000
2.5\times10^{4} === 25,000
2.5\times10^{4} === 2.5 \cdot 10^4
2.5\times10^{4} =/= 2.5\times10^{5}
6.02\times10^{23} === 6.02\times10^{23}
6.02\times10^{23} =/= 6.02\times10^{22}
0.1 =/= 0.10001
# roots and powers
\sqrt{8} === 2\sqrt{2}
\sqrt{8} === 2\sqrt2
\sqrt{8} === 8^{1/2}
\sqrt{8} === \sqrt{4}\sqrt{2}
\sqrt{8} === 2 \cdot \sqrt{2}
\sqrt{8} =/= 2\sqrt{3}
\sqrt{8} =/= \sqrt{2}
\sqrt{8} =/= -2\sqrt{2}
\sqrt{8} =/= 2.8
\sqrt{8} =/= 4
\sqrt[3]{27} === 3
\sqrt[3]{2} === 2^{1/3}
\sqrt[3]{2} === 2^{\frac{1}{3}}
\sqrt[3]{2} =/= \sqrt{2}
\frac{\sqrt{3}}{3} === \frac{1}{\sqrt{3}}
\frac{\sqrt{3}}{3} === \sqrt{\frac13}
\frac{\sqrt{3}}{3} =/= \frac{\sqrt{3}}{2}
3+2\sqrt{2} === (1+\sqrt{2})^2
3+2\sqrt{2} === 2\sqrt{2}+3
3+2\sqrt{2} =/= 3-2\sqrt{2}
\sqrt{5+2\sqrt{6}} === \sqrt{2}+\sqrt{3}
\sqrt{5+2\sqrt{6}} =/= \sqrt{3}-\sqrt{2}
\frac{1+\sqrt{5}}{2} === \frac{\sqrt{5}+1}{2}
\frac{1+\sqrt{5}}{2} =/= \frac{1-\sqrt{5}}{2}
e^{2} === e^2
e^{2} =/= 2e
e^{2} =/= e^{3}
\ln 2 === \ln(2)
\ln 2 === \frac{1}{2}\ln 4
\ln 2 =/= \ln 3
\log_2 8 === 3
\log_{10} 100 === 2
# trigonometry and pi
\pi === \pi
\pi =/= 3.14
\pi =/= 2\pi
\frac{\pi}{4} === \pi/4
\frac{\pi}{4} === 0.25\pi
\frac{\pi}{4} === \arctan 1
\frac{\pi}{4} === \frac{1}{4}\pi
\frac{\pi}{4} =/= \frac{\pi}{3}
\frac{\pi}{4} =/= 45
\sin 30^\circ =/= 1
\frac{\sqrt{3}}{2} === \sin\frac{\pi}{3}
\frac{\sqrt{3}}{2} === \cos(\frac{\pi}{6})
12\pi === 12 \pi
12\pi =/= 12
# complex numbers
3+4i === 3+4i
3+4i === 4i+3
3+4i === 3 + 4 i
3+4i =/= 3-4i
3+4i =/= 7i
3+4i =/= 5
-i === -i
-i =/= i
2i === 2 i
# expressions
2x+1 === 1+2x
2x+1 === 2x + 1
2x+1 === y = 2x+1
2x+1 === f(x) = 2x+1
2x+1 =/= 2x-1
2x+1 =/= 2y+1
2x+1 =/= 3
(x+1)^2 === x^2+2x+1
(x+1)^2 === (1+x)(x+1)
(x+1)^2 =/= x^2+1
x^2-1 === (x-1)(x+1)
x^2-1 =/= (x-1)^2
\frac{a}{b} === a/b
\frac{a}{b} =/= b/a
\frac{n(n+1)}{2} === \frac{n^2+n}{2}
\frac{n(n+1)}{2} === \frac{1}{2}n(n+1)
\frac{n(n+1)}{2} === \binom{n+1}{2} = \frac{n(n+1)}{2}
\frac{n(n+1)}{2} =/= \frac{n(n-1)}{2}
2^{n} - 1 === 2^n-1
2^{n} - 1 =/= 2^{n-1}
ab === ba
ab === a b
ab === a \cdot b
x^{2}y === yx^2
x^{2}y =/= xy^2
\sin^2 x === (\sin x)^2
\sin^2 x === 1-\cos^2 x
\sin^2 x =/= \cos^2 x
e^{x} === \exp(x)
# equations
x=5 === 5
x=5 === x = 5
x=5 === x=\frac{10}{2}
x=5 =/= x=6
x=5 =/= y=5
y=2x+3 === y = 3+2x
y=2x+3 === 2x+3
y=2x+3 === 2x - y + 3 = 0
y=2x+3 === y - 2x = 3
y=2x+3 =/= y=2x-3
y=2x+3 =/= y=3x+2
x^2+y^2=25 === y^2+x^2=25
x^2+y^2=25 === x^2+y^2-25=0
x^2+y^2=25 =/= x^2+y^2=5
x^2+y^2=25 =/= 25
x^2+y^2=25 =/= x^2-y^2=25
2x+3y=6 === 3y+2x=6
2x+3y=6 === 4x+6y=12
2x+3y=6 =/= 2x+3y=7
x=1,y=2 === x = 1, y = 2
x=1,y=2 =/= x=2,y=1
# intervals and inequalities
[0,1) === [0,1)
[0,1) === [0, 1)
[0,1) === \left[0,1\right)
[0,1) === 0 \le x < 1
[0,1) === 0\leq x<1
[0,1) === x \in [0,1)
[0,1) === 1 > x \ge 0
[0,1) =/= [0,1]
[0,1) =/= (0,1)
[0,1) =/= (0,1]
[0,1) =/= 0 < x < 1
[0,1) =/= 0 \le x \le 1
[0,1) =/= [0,2)
[0,1) =/= 0
[2,5] === [2, 5]
[2,5] === 2 \le x \le 5
[2,5] === x\in[2,5]
[2,5] =/= (2,5)
[2,5] =/= [2,4]
[2,5] =/= 2 < x < 5
[2,5] =/= 3
(2,\infty) === (2, \infty)
(2,\infty) === (2,+\infty)
(2,\infty) === x > 2
(2,\infty) === x>2
(2,\infty) === 2 < x
(2,\infty) =/= [2,\infty)
(2,\infty) =/= x \ge 2
(2,\infty) =/= x < 2
(-\infty,3] === x \le 3
(-\infty,3] === x\leq3
(-\infty,3] =/= x<3
(-\infty,0)\cup(1,\infty) === (-\infty, 0) \cup (1, \infty)
(-\infty,0)\cup(1,\infty) === (1,\infty)\cup(-\infty,0)
(-\infty,0)\cup(1,\infty) === x<0 \text{ or } x>1
(-\infty,0)\cup(1,\infty) =/= (-\infty,0]\cup[1,\infty)
(-\infty,0)\cup(1,\infty) =/= (0,1)
x > 2 === x > 2
x > 2 === 2 < x
x > 2 === (2,\infty)
x > 2 =/= x \ge 2
x > 2 =/= x > 3
0<x<1 === (0,1)
0<x<1 === 0 < x < 1
0<x<1 =/= 0<x<2
(-\infty,\infty) === (-\infty, \infty)
(-\infty,\infty) === \mathbb{R}
\mathbb{R} === \mathbb{R}
\mathbb{R} =/= \mathbb{Z}
# sets and lists
\{1,2\} === \{1,2\}
\{1,2\} === \{2,1\}
\{1,2\} === \{1, 2\}
\{1,2\} === 1, 2
\{1,2\} === 2, 1
\{1,2\} === 1,2
\{1,2\} === \left\{1,2\right\}
\{1,2\} === 1 \text{ and } 2
\{1,2\} === 1 \text{ or } 2
\{1,2\} === x=1, x=2
\{1,2\} === x=1 \text{ or } x=2
\{1,2\} =/= \{1,3\}
\{1,2\} =/= \{1\}
\{1,2\} =/= \{1,2,3\}
\{1,2\} =/= 1
\{1,2\} =/= 2
\{1,2\} =/= [1,2]
1,2,3 === 1, 2, 3
1,2,3 === 3, 2, 1
1,2,3 === \{1,2,3\}
1,2,3 =/= 1,2
1,2,3 =/= 1,2,4
1,2,3 =/= 123
-1, 2 === 2, -1
-1, 2 =/= 1, 2
\{\frac12, 3\} === 3, 0.5
\pm 2 === \pm 2
\pm 2 === 2, -2
\pm 2 === -2, 2
\pm 2 =/= 2
\pm 2 =/= -2
1\pm\sqrt{2} === 1+\sqrt{2}, 1-\sqrt{2}
1\pm\sqrt{2} =/= 1+\sqrt{2}
\emptyset === \emptyset
\emptyset === \varnothing
\emptyset === \{\}
\emptyset =/= 0
\emptyset =/= \{0\}
# tuples
(1,2) === (1,2)
(1,2) === (1, 2)
(1,2) === \left(1,2\right)
(1,2) === (1, \frac{4}{2})
(1,2) === (x,y) = (1,2)
(1,2) === (x, y) = (1, 2)
(1,2) === x=1, y=2
(1,2) =/= (2,1)
(1,2) =/= (1,3)
(1,2) =/= (1,2,3)
(1,2) =/= 1
(1,2) =/= 3
(1,2,3) === (1, 2, 3)
(1,2,3) =/= (3,2,1)
(1,2,3) =/= (1,2)
(-1,0) =/= (0,-1)
(-1,0) === (-1, 0)
(3,\frac{\pi}{2}) === \left( 3, \frac{\pi}{2} \right)
(3,\frac{\pi}{2}) === (3, \pi/2)
(3,\frac{\pi}{2}) =/= (3, \pi)
(1,2),(3,4) === (1,2), (3,4)
(1,2),(3,4) =/= (1,2)
(1,2),(3,4) =/= (1,2),(4,3)
# units
5 === 5\text{ cm}
5 === 5 \text{ cm}
5 === 5\,\mathrm{cm}
5 === 5\ \text{apples}
5 === 5 \text{ dollars}
5 === \$5
5 === 5 cm
5 === 5 apples
5 === 5\text{ cm}^2
5 =/= 6\text{ cm}
5 =/= 50\text{ cm}
5\text{ cm} === 5
5\text{ cm} === 5 \text{ cm}
5\text{ cm} === 5\,\mathrm{cm}
5\text{ cm} === 5\text{ centimeters}
5\text{ cm} =/= 5\text{ m}
5\text{ cm} =/= 5\text{ km}
5\text{ cm} =/= 4\text{ cm}
12\text{ m}^2 === 12\text{ square meters}
12\text{ m}^2 === 12 \text{ m}^2
12\text{ m}^2 =/= 13\text{ m}^2
45^\circ === 45^\circ
45^\circ === 45
45^\circ === 45^{\circ}
45^\circ === 45 \text{ degrees}
45^\circ === 45°
45^\circ =/= 46^\circ
45 === 45^\circ
3\text{ hours} === 3
3\text{ hours} === 3 \text{ hours}
3\text{ hours} =/= 3\text{ minutes}
3\text{ hours} =/= 180
\$18.90 === 18.90
\$18.90 === \$18.9
\$18.90 === 18.9
\$18.90 =/= \$18.09
\$1{,}250 === 1250
\$1{,}250 === \$1,250
60\text{ km/h} === 60
60\text{ km/h} === 60 \text{ km/h}
60\text{ km/h} =/= 50 \text{ km/h}
# units that are none
5 =/= 5 \text{ or } 6
5 =/= 5\text{ or }6\text{ cm}
2 =/= 2 apples and 3 oranges
3 =/= 3 hours 20 minutes
3 =/= 3\text{ hours }20\text{ minutes}
7 =/= 7 \text{ if n is even}
7 =/= 7 \text{ if } n \text{ is even}
5 =/= 5 \text{ or more}
3 =/= 3 \text{ dozen}
3 =/= 3 thousand
6 =/= 6 feet 2 inches
2 abcd =/= 2
2abcd =/= 2
3\mathbf{v} =/= 3
3\mathrm{i} =/= 3
2 mg =/= 2
2 ms =/= 2
\frac{1}{2} M =/= \frac{1}{2}
5 M =/= 5
5 m^2 =/= 5
x=5 =/= y = 5 cm
x=5 === x = 5 cm
5\text{ bolts} === 5 bolts
5\text{ bolts} === 5
\frac{1}{2} hour === \frac{1}{2}
\frac{1}{2} hour === 30 minutes
90 === 90^\circ\text{C}
5 === 5 \times 10^{0} m
60\text{ miles per hour} === 60 mph
60\text{ miles per hour} =/= 60 km/h
2 =/= 2 alpha
2 =/= 2 sqrt
3 =/= 3 or more
3 roots === 3 roots
3 === 3 months
3 =/= 3 fifths
3 =/= 3 tenths
# expressions that are equal where both are defined
\sqrt{(x-1)^2} =/= x-1
\sqrt{(x-1)^2} === |x-1|
\ln(x^2) === 2\ln(x)
\sqrt{x}\sqrt{y} =/= \sqrt{x+y}
\sqrt{x^2+1} =/= x+1
\frac{1}{\sqrt{x^2}} =/= \frac{1}{x}
\sqrt{x^2 y} =/= x\sqrt{y}
\sqrt{x^2 y} === |x|\sqrt{y}
# rounding
\pi === 3.141593
\pi =/= 3.14159
6.02\times10^{23} =/= 6.0200001\times10^{23}
2^{100} =/= 1.2676506\times10^{30}
10^{20} =/= 100000000000000000001
0.00001 =/= 0.0000104
# percentages
50\% === 50\%
50\% === 50
50\% === 0.5
50\% === \frac{1}{2}
50\% === 50 \%
50\% === 50%
50\% === 50 \text{ percent}
50\% =/= 5\%
50\% =/= 5
50\% =/= 0.05
50 === 50\%
50 =/= 0.5
0.5 === 50\%
0.5 =/= 5\%
12.5\% === 12.5
12.5\% === 12.5\%
12.5\% === \frac{25}{2}\%
12.5\% === 0.125
12.5\% =/= 12\%
# text
\text{Monday} === \text{Monday}
\text{Monday} === Monday
\text{Monday} === \text{monday}
\text{Monday} === \mathrm{Monday}
\text{Monday} === \textbf{Monday}
\text{Monday} =/= \text{Sunday}
\text{Monday} =/= \text{Mondya}
\text{Monday} =/= \text{Monday or Tuesday}
\text{Monday} =/= 1
\text{even} === even
\text{even} =/= odd
\text{even} =/= neve
\text{even} =/= not even
\text{odd} =/= \text{even}
\text{Yes} === yes
\text{Yes} === Yes.
\text{Yes} =/= No
\text{Yes} =/= sey
\text{No} =/= on
\text{True} === true
\text{True} =/= False
\text{Angela} === Angela
\text{Angela} =/= Galena
\text{east} =/= \text{seat}
\text{red} === \text{ red }
\text{no solution} === \text{No solution}
\text{no solution} === no solution
\text{no solution} =/= 0
\text{infinitely many} === \text{infinitely many}
\text{infinitely many} =/= \text{finitely many}
\text{ellipse} =/= \text{circle}
# choices
B === B
B === \text{B}
B === (B)
B === \text{(B)}
B === \textbf{(B)}
B === B.
B === \mathrm{B}
B =/= C
B =/= (A)
B =/= A, B
B =/= A B
\text{(C)} === C
\text{(C)} === (C)
\text{(C)} =/= (D)
A === A
A =/= E
(E) === E
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} === \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} === \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} === \begin{pmatrix}1&\frac{4}{2}\\3&2^2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} === A = \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} =/= \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} =/= \begin{pmatrix}1&2\\3&5\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} =/= \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} =/= 10
\begin{pmatrix}-7\\16\\5\end{pmatrix} === \begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}
\begin{pmatrix}-7\\16\\5\end{pmatrix} =/= \begin{pmatrix}16\\-7\\5\end{pmatrix}
\begin{pmatrix}1/2\\0\end{pmatrix} === \begin{pmatrix}0.5\\0\end{pmatrix}
\begin{pmatrix}1/2\\0\end{pmatrix} === \begin{bmatrix}\frac12\\0\end{bmatrix}
# formatting
7 === \left(7\right)
7 === \displaystyle 7
7 === 7\qquad
7 === \,7
7 === \boxed{7}
7 === \,\,7\,\,
7 === \textbf{7}
7 === 7\text{.}
7 === \text{The answer is }7
7 === The answer is 7
7 === 7;
7 === \( 7 \)
7 === \[7\]
7 === ７
\frac{3}{4} === \frac 3 4
\frac{3}{4} === \frac{3}{4}.
\frac{3}{4} === \cfrac{3}{4}
\frac{3}{4} === 3⁄4
\frac{3}{4} === ¾
\sqrt{3} === √3
\sqrt{3} === \sqrt3
2\pi === 2π
x^2 === x²
"""


def load_pairs(table: str = TABLE) -> list[Pair]:
    """Return all pairs, in the order of the table. Raise ValueError for a line that is no pair."""
    pairs, kind = [], ""
    for line in table.strip().splitlines():
        if line.startswith("# "):
            kind = line[2:]
            continue
        for sign, right in ((" === ", True), (" =/= ", False)):
            gold, found, answer = line.partition(sign)
            if found:
                pairs.append(Pair(kind, gold, answer, right))
                break
        else:
            raise ValueError(f"no pair: {line!r}")
    return pairs
