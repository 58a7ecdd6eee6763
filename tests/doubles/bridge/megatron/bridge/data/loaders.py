import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler


class Numbers(torch.utils.data.Dataset):
    """Texts of random tokens; which, says the number of the sample."""

    def __init__(self, total, length, vocabulary, first):
        self.total, self.length, self.vocabulary, self.first = total, length, vocabulary, first

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + int(index))
        text = torch.randint(self.vocabulary, (self.length + 1,), generator=generator)
        return {"tokens": text[:-1], "labels": text[1:]}


def cyclic_iter(iter):
    while True:
        yield from iter


def build_pretraining_data_loader(
    dataset, consumed_samples, dataloader_type, micro_batch_size, data_sharding, data_parallel_rank, data_parallel_size
):
    place = (len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
    if dataloader_type == "single":
        sampler = MegatronPretrainingSampler(*place)
    else:
        sampler = MegatronPretrainingRandomSampler(dataset, *place, data_sharding)
    return torch.utils.data.DataLoader(dataset, batch_sampler=sampler)


def build_train_valid_test_data_loaders(cfg, train_state, build_train_valid_test_datasets_provider, dp_group):
    mine = (torch.distributed.get_rank(dp_group), torch.distributed.get_world_size(dp_group))
    train, valid, _ = build_train_valid_test_datasets_provider(cfg)
    common = (cfg.train.micro_batch_size, cfg.dataset.data_sharding, *mine)
    flags = torch.tensor([1, 1, 0])
    torch.distributed.broadcast(flags, 0)
    train_state.do_train, train_state.do_valid = bool(flags[0]), bool(flags[1])
    return (
        build_pretraining_data_loader(train, train_state.consumed_train_samples, "single", *common),
        build_pretraining_data_loader(valid, train_state.consumed_valid_samples, "cyclic", *common),
        None,
    )


def setup_data_iterators(cfg, train_state, provider, dp_group):
    train, valid, _ = build_train_valid_test_data_loaders(cfg, train_state, provider, dp_group)
    return RerunDataIterator(iter(train)), RerunDataIterator(iter(cyclic_iter(valid)))


def datasets(cfg):
    of = (cfg.model.seq_length, cfg.model.vocab_size)
    return Numbers(cfg.train.train_iters * cfg.train.global_batch_size, *of, 0), Numbers(64, *of, 10**6), None
