"""TODO extract/certify"""
