"""TODO rules/language"""
