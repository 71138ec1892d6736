"""TODO tapestry_egg/plans"""
