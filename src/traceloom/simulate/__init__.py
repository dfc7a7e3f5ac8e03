"""What if? A linked graph evaluated with changes."""

from traceloom.simulate.changes import Change, Scenario, parse
from traceloom.simulate.selection import Selection
from traceloom.simulate.whatif import WhatIf, scenario_of, whatif, whatif_many

__all__ = ["Change", "Scenario", "Selection", "WhatIf", "parse", "scenario_of", "whatif", "whatif_many"]
