"""What draws and explains: schedules as pictures, masks as pictures, and what the cost model predicts."""
