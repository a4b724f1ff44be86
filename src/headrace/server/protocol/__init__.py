"""Wire types: a decoded body becomes a checked request, or an error that names the field. One validator for all APIs (dialects/).

What lives here: which fields a route takes and how they map to SamplingParams. What may not: HTTP, the bounds of sampling
parameters (sampling_params.py checks them once for every route), rendering of answers.
"""
