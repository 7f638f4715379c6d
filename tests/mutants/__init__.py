"""A museum of silent bugs: small changes of this package, each of which recreates one, and the tests that see it."""
