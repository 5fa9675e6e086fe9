"""`dfirst plan`: who would copy what from whom, for two layouts that need not run anywhere."""
