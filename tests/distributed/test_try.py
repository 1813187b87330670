import time, traceback, io, contextlib, logging
import pytest, torch
from tests.fits import Language, Sentences, fit
from tests.models import build, tiny, FAMILIES
from lightning_zero3 import Zero3FastStrategy

def go(family, options, precision="32-true"):
    t=time.time(); lines=[]
    class H(logging.Handler):
        def emit(self, r): lines.append(r.getMessage())
    h=H(); logging.getLogger("lightning.pytorch").addHandler(h)
    try:
        fit(Language(build(tiny(family))), Sentences(64), Zero3FastStrategy(verify_parallel=True, **options), steps=1, precision=precision)
        return "ok", round(time.time()-t,1), [l for l in lines if "verify" in l]
    except Exception:
        return "FAIL", traceback.format_exc()[-3000:]
    finally: logging.getLogger("lightning.pytorch").removeHandler(h)

@pytest.mark.parametrize("family", FAMILIES)
def test_it(ranks, family):
    print(family, *ranks(1).run(go, family, {"expert_parallel_size": 1}))
    print(family, *ranks(1).run(go, family, {"expert_parallel_size": 1}, "bf16-mixed"))

@pytest.mark.parametrize("options", [{"expert_parallel_size": 2},{"tensor_parallel_size": 2},{"tensor_parallel_size": 2,"expert_parallel_size": 2}])
@pytest.mark.parametrize("family", FAMILIES)
def test_2(ranks, family, options):
    print(family, options, *ranks(2).run(go, family, options))
