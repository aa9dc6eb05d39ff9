"""Model states in files that outlive the job."""
