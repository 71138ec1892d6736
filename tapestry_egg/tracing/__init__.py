"""TODO tapestry_egg/tracing"""
