"""An engine, a transport and a scorer's runtime as a user writes them: a module outside of this repository."""

from pathlib import Path

ENGINE = "plugged:ForwardEngine"
ADAPTED_ENGINE = "plugged:AdaptedForwardEngine"
TRANSPORT = "plugged:FileTransport"
RUNTIME = "plugged:ForwardRunner"

SOURCE = '''
import asyncio, tempfile, time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from headway.broker.errors import HeadwayError, WeightSyncError
from headway.rollout_workers.engines.abilities import EngineAbilities
from headway.rollout_workers.engines.base import Chunk, WeightFingerprints
from headway.rollout_workers.engines.weight_loading.named_tensors import Filling, fill, load_tensors
from headway.rollout_workers.scorers import pack_candidates
from headway.weightsync.tensors.fingerprint import fingerprint
from headway.weightsync.transports.base import TransportAbilities


class ForwardEngine:
    """A whole forward for every token, one sample after the other; nothing is cached."""

    abilities = EngineAbilities(gpu_options=("copies",), sleeps=False, tells_experts=False)

    def __init__(self, config, model_dir, *, seed):
        self.capacity, self.max_model_len = config.max_concurrent, config.max_model_len
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir)).eval()
        self._generator = torch.Generator().manual_seed(seed)
        self._version, self._may_sample, self._is_closed = None, asyncio.Event(), False

    async def generate(self, request):
        self._check(request.prompt_tokens)
        tokens = list(request.prompt_tokens)
        end = min(len(tokens) + request.max_new_tokens, self.max_model_len)
        while True:
            await self._may_sample.wait()
            if self._is_closed:
                raise HeadwayError("the engine was closed")
            logprobs = self._logprobs(tokens, request.temperature or 1.0)[-1]
            drawn = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            token = int(drawn if request.temperature else logprobs.argmax())
            tokens.append(token)
            reason = "stop" if token in request.stop_token_ids else "length" if len(tokens) >= end else None
            yield Chunk(
                token_ids=[token], logprobs=[float(logprobs[token])], version=self._version, finish_reason=reason
            )
            if reason:
                return
            await asyncio.sleep(0)

    async def swap_weights(self, version, tensors, *, keep_cache=False, check=None):
        load_tensors(self._model, tensors)
        self._hold(version, check)

    async def swap_in_parts(self, version, parts, *, keep_cache=False, check=None):
        filling = Filling(self._model)
        async for part in parts:
            self._may_sample.clear()
            fill(filling.places(part))
        filling.check_whole()
        self._hold(version, check)

    async def score(self, token_ids):
        logprobs = self._logprobs(token_ids[:-1], 1.0)
        return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    async def close(self):
        self._is_closed = True
        self._may_sample.set()

    def _hold(self, version, check, held=None):
        self._may_sample.clear()
        if check:
            check(held)
        self._version = version
        self._may_sample.set()

    def _check(self, prompt):
        if self._is_closed:
            raise HeadwayError("the engine was closed")
        if self._version is None:
            raise HeadwayError("call swap_weights first")
        if not 0 < len(prompt) < self.max_model_len:
            raise HeadwayError(f"a prompt of {len(prompt)} tokens, and max_model_len is {self.max_model_len}")
        if max(prompt) >= self._model.config.vocab_size:
            raise HeadwayError("a token that the tokenizer does not have")

    @torch.no_grad()
    def _logprobs(self, tokens, temperature):
        logits = self._model(torch.tensor([tokens])).logits[0].float()
        return torch.log_softmax(logits / temperature, -1)


class AdaptedForwardEngine(ForwardEngine):
    """The same, whose linear layers add an adapter to what they compute."""

    abilities = EngineAbilities(sleeps=False, tells_experts=False, takes_adapters=True, takes_expert_adapters=False)

    async def load_base(self, tensors, *, check=None):
        self._may_sample.clear()
        load_tensors(self._model, tensors)
        if check:
            check(None)

    async def swap_adapter(self, version, tensors, scale, *, keep_cache=False, check=None):
        factors = {name: tensor.clone() for name, tensor in tensors}
        for name in factors:
            if name.endswith(".lora_A"):
                module = self._model.get_submodule(name.removesuffix(".lora_A"))
                first, second = factors[name], factors[name[:-1] + "B"]
                module.forward = lambda x, m=module, a=first, b=second: type(m).forward(m, x) + (x @ a.T) @ b.T * scale
        held = {name: (fingerprint(tensor), tensor.numel()) for name, tensor in factors.items()}
        self._hold(version, check, WeightFingerprints.of(held))

    async def score_base(self, token_ids):
        changed = [(m, m.__dict__.pop("forward")) for m in self._model.modules() if "forward" in m.__dict__]
        try:
            return await self.score(token_ids)
        finally:
            for module, forward in changed:
                module.forward = forward


class FileTransport:
    """Rank 0 writes each bucket as a file, which the others read; whoever leaves says so in a file too."""

    abilities = TransportAbilities(sends_gpu_memory=False, crosses_hosts=False)

    def __init__(self, store, rank, size, interface, deadline):
        self._rank, self._others, self._count = rank, size - 1, 0
        try:
            if rank == 0:
                store.set("directory", tempfile.mkdtemp(prefix="group-", dir=Path(__file__).parent))
            else:
                while not store.check(["directory"]):
                    deadline.pause(0.01)
                    deadline.check("joining a group of files")
            self._directory = Path(store.get("directory").decode())
            store.add("members", 1)
            while store.add("members", 0) < size:
                deadline.pause(0.01)
                deadline.check("forming a group of files")
        except RuntimeError as error:
            raise WeightSyncError(f"no group of files: {error}") from error

    def start(self, bucket, deadline):
        self._count += 1
        file = self._directory / str(self._count)
        if self._rank == 0:
            (new := file.with_suffix(".new")).write_bytes(bucket.numpy().tobytes())
            new.rename(file)

        def finish():
            if self._rank:
                self._await(file.exists, deadline)
                bucket.copy_(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
                file.with_suffix(f".taken{self._rank}").touch()
            else:
                self._await(lambda: len(list(self._directory.glob(f"{file.name}.taken*"))) == self._others, deadline)

        return finish

    def close(self):
        (self._directory / "closed").touch()

    def _await(self, is_so, deadline):
        while not is_so():
            if (self._directory / "closed").exists():
                raise WeightSyncError("the group of files was closed by another member")
            deadline.check("a bucket in a file")
            time.sleep(0.001)


class ForwardRunner:
    """A forward for every request."""

    def __init__(self, asked, config):
        self._is_teacher = asked.kind == "teacher"
        opener = AutoModelForCausalLM if self._is_teacher else AutoModelForSequenceClassification
        self._model = opener.from_pretrained(asked.path).eval()
        self.vocabulary, self.longest = self._model.config.vocab_size, self._model.config.max_position_embeddings
        self._shared = AutoConfig.from_pretrained(asked.policy).vocab_size if asked.policy else self.vocabulary

    @torch.no_grad()
    def score(self, requests):
        return [self._logprobs(one) if self._is_teacher else self._score(one) for one in requests]

    def _score(self, request):
        hidden = self._model.base_model(torch.tensor([self._tokens(request)])).last_hidden_state
        return self._model.score(hidden)[0, -1].numpy()

    def _logprobs(self, request):
        tokens, start = self._tokens(request), len(request.prompt_tokens)
        logits = self._model(torch.tensor([tokens])).logits[0, start - 1 : -1] / request.temperature
        logprobs = logits.log_softmax(-1)
        best = logprobs[:, : self._shared].topk(request.top_k)
        own = logprobs.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
        return pack_candidates(own.numpy(), best.indices.numpy(), best.values.numpy())

    def _tokens(self, request):
        return [*request.prompt_tokens.tolist(), *request.response_tokens.tolist()]


class Deaf:
    """No engine at all."""

    capacity = 1

    def __init__(self, config, model_dir, *, seed):
        pass


def told(config, model_dir, *, seed, sleeps):
    """A function does as well as a class, and is told what will be asked for, if it names that."""
    raise HeadwayError(f"told: {sleeps=}")
'''


def write(directory: Path) -> None:
    """Write plugged.py, whose classes a recipe names as `plugged:Name`."""
    (directory / "plugged.py").write_text(SOURCE)
