"""From a few recorded ranks to many: see `traceloom.simulate.scale`."""
