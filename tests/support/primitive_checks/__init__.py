"""One suite for the primitives of every backend, compared with float64 NumPy.

A test module imports all of it and has these fixtures: `backend`; `dtype` and `other_dtype`, each once for every dtype
of blobs that the backend has. A module of the suite has the tests of one group of primitives: a test names inputs and
settings and what float64 makes of them (`backend_oracle`).
"""

from primitive_checks.batch_norm import *  # noqa: F403 -- the tests
from primitive_checks.convolution import *  # noqa: F403
from primitive_checks.dense import *  # noqa: F403
from primitive_checks.elementwise import *  # noqa: F403
from primitive_checks.flow import *  # noqa: F403
from primitive_checks.indexing import *  # noqa: F403
from primitive_checks.input import *  # noqa: F403
from primitive_checks.memory import *  # noqa: F403
from primitive_checks.pooling import *  # noqa: F403
from primitive_checks.random import *  # noqa: F403
from primitive_checks.recurrent import *  # noqa: F403
from primitive_checks.softmax import *  # noqa: F403
