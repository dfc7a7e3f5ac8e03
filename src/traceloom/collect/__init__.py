"""The fleet's service: takes captures of whole jobs, has them analysed, and answers over HTTP."""
