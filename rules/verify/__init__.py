"""TODO rules/verify"""
