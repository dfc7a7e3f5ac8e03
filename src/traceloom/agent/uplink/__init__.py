"""The way up: this agent dials the fleet's service, says how its host is, and does what the service asks.

messages    what goes over the wire, both ways
client      one connection to the service
clock       how far the host's clock is from the service's
usage       whose each device was, minute by minute
link        the loops: enrol, heartbeat, work, upload
"""
