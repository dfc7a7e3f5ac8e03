"""Every collective of one trace as a row: bytes, bandwidth, exposed and blocking time; groups and who talks to whom."""
