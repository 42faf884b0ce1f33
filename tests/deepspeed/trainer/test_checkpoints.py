"""save_checkpoint and load_checkpoint, also with another number of ranks for each sequence."""

import pytest
from engines import config_of, dataset, in_order, start
from ranks import processes

import burst_mcore.deepspeed as burst


def _steps(engine, data, sp, first, last):
    loader = burst.shard_loader(in_order(data, sp), engine)
    losses = []
    for number, batch in enumerate(loader):
        if first <= number < last:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def _resumed(rank, size, folder, stages):
    data = dataset(8)
    doubled = [x for x in data for _ in range(2)]  # DP 2 over them: both ranks get the same
    for stage in stages:
        config = config_of(stage, size)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
        engine, _ = start(config)
        straight = _steps(engine, data, size, 0, 2)
        engine.save_checkpoint(f"{folder}/{stage}", tag="two", client_state={"seen": 2})
        straight += _steps(engine, data, size, 2, 4)
        engine.destroy()
        for sp in (size, size // 2):
            engine, _ = start({**config, "sequence_parallel_size": sp})
            _, client = engine.load_checkpoint(f"{folder}/{stage}")
            again = _steps(engine, data if sp == size else doubled, sp, 2, 4)
            engine.destroy()
            assert client["seen"] == 2 and again == pytest.approx(straight[2:], rel=1e-4), (stage, sp)


@pytest.mark.parametrize(
    ("size", "stages"), [(2, (3,)), pytest.param(4, (0, 2, 3), marks=pytest.mark.slow)], ids=["2", "4"]
)
def test_resumed_at_this_and_at_another_sp(tmp_path, size, stages):
    processes(size, _resumed, str(tmp_path), stages)
