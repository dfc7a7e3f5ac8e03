"""The HTTP interface: a unix socket whose peers are known by their credentials, TCP where it is asked for."""
