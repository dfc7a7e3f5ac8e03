"""Storage: where columns lie when they are large, and the cache of what was read. `read` and `model` alone use it.

Arrays of very large traces lie in mapped files (`ondisk`) and become Polars columns without a copy (`mapped`); columns
that are still being gathered go to files too (`spill`); `cache` keeps folders by the content they were made from.
"""
