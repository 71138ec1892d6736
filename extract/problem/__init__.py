"""TODO extract/problem"""
