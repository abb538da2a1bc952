"""Residents: the processes on a device that hold weights. One engine, one trainer, each for many runs.

Both are Ray actors whose calls may overlap: a run can be cancelled, joined, resized or dropped while others
compute. What computes does so slice by slice (a token of every sequence, a micro-batch) on computing threads
of the resident's own, so that what libraries keep per thread is kept for these few.

Nothing is imported here: a pipeline reads a resident's errors and news, and needs no torch for it.
"""
