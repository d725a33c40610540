"""What ranks do otherwise when they evaluate in training: planted by :mod:`tests.parallel.faults`."""


def fail_task_on_rank_one() -> None:
    """The model fails on rank 1 alone while it answers one task, as where memory runs out there."""
    import os

    from lightnet_llm.models import CausalLM
    from lightnet_llm.training import evaluation

    original, hidden, now = evaluation.Evaluation._scores, CausalLM.hidden, [""]

    def fails(self, *arguments, **options):  # type: ignore[no-untyped-def]
        if now == ["sciq"] and os.environ["RANK"] == "1":
            raise RuntimeError("planted")
        return hidden(self, *arguments, **options)

    def scores(self, model, task):  # type: ignore[no-untyped-def]
        now[:] = [task]
        try:
            return original(self, model, task)
        finally:
            now[:] = [""]

    evaluation.Evaluation._scores, CausalLM.hidden = scores, fails


def noted(found):  # type: ignore[no-untyped-def]
    """Keep every log likelihood that lm-eval is told, in the order of its requests."""
    from lightnet_eval import language_model

    original = language_model.likelihoods

    def likelihoods(*arguments):  # type: ignore[no-untyped-def]
        answers = original(*arguments)
        found.extend(answer.log_likelihood for answer in answers)
        return answers

    language_model.likelihoods = likelihoods
    return lambda: setattr(language_model, "likelihoods", original)


def note_likelihoods() -> None:
    """Log likelihoods stand beside the scores of a task."""
    from lightnet_llm.training import evaluation

    original = evaluation.Evaluation._scores

    def scores(self, model, task):  # type: ignore[no-untyped-def]
        found = []
        restore = noted(found)
        measured = original(self, model, task)
        restore()
        return {**measured, "nats": {str(index): value for index, value in enumerate(found)}}

    evaluation.Evaluation._scores = scores


def continued(loaded, ranks=None) -> float:  # type: ignore[no-untyped-def]
    """A number that tells the continuations of three prompts."""
    import zlib

    from lightnet_eval.language_model import LightNetLM
    from lm_eval.api.instance import Instance

    options = {"until": [], "max_gen_toks": 12}
    prompts = ("the ship", "", "an old friend writes to the harbour keeper and")
    requests = [Instance("generate_until", {}, (prompt, options), index) for index, prompt in enumerate(prompts)]
    texts = LightNetLM(loaded=loaded, ranks=ranks).generate_until(requests, disable_tqdm=True)
    assert any(texts)
    return float(zlib.crc32("\n".join(texts).encode()))


def continue_in_evaluation() -> None:
    """A task of continuations."""
    from lightnet_llm.inference import Loaded
    from lightnet_llm.training import evaluation

    def scores(self, model, task):  # type: ignore[no-untyped-def]
        return {"texts": continued(Loaded(model, self.config, self.tokenizer, self.run_folder), self.share)}

    evaluation.Evaluation._scores = scores
