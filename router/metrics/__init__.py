"""The router's metrics: counted as requests pass, or read from its state at scrape time.

On the request path counting is additions in C++ (`router/native/request_sums.hpp`); samples are made at the scrape.
Every label set exists at 0 from the start, and is removed with the model or worker that it names.
"""
