"""What a fleet keeps: tables of numbers for months, beside the state and the files of the service."""
