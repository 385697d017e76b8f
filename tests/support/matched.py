"""The log-density of the matched variable, from the two halves of its plan."""


def log_prob(plan, u, context=None):
    return -plan.energy(u, context) - plan.log_z(tuple(u.shape[1:]), u)
