"""Builders of the optimizer's parts from the configuration."""

from __future__ import annotations

from megatron.config import Config
from megatron.optimizer.loss_scaler import ConstantScaler, DynamicScaler, LossScaler
from megatron.optimizer.lr import LearningRate, WeightDecay
from megatron.optimizer.state_formats import DTYPES, StateFormats
from megatron.optimizer.update_rules import SGD, AdamW, ApexAdamW, UpdateRule


def update_rule(config: Config) -> UpdateRule:
    """Return the update rule of the configured optimizer."""
    options = config.optimizer
    if options.optimizer == "sgd":
        return SGD(
            momentum=options.sgd_momentum,
            nesterov=options.sgd_nesterov,
            coupled=options.sgd_weight_decay == "coupled",
        )
    kind = ApexAdamW if options.optimizer_impl == "apex" else AdamW
    return kind(beta1=options.adam_beta1, beta2=options.adam_beta2, eps=options.adam_eps)


def state_formats(config: Config) -> StateFormats:
    """Return the formats of master weights and moments."""
    options = config.optimizer
    return StateFormats(
        main=DTYPES[options.main_params_dtype],
        rounding=options.main_params_rounding or "stochastic",
        exp_avg=options.exp_avg_dtype,
        exp_avg_sq=options.exp_avg_sq_dtype,
        seed=config.training.seed,
    )


def loss_scaler(config: Config) -> LossScaler:
    """Return a dynamic loss scaler for fp16 without `--loss-scale`, else a constant one."""
    options = config.precision
    if options.loss_scale is not None or not options.fp16:
        return ConstantScaler(options.loss_scale or 1.0)
    return DynamicScaler(
        scale=float(options.initial_loss_scale),
        min_scale=options.min_loss_scale,
        window=options.loss_scale_window,
        hysteresis=options.hysteresis,
    )


def learning_rate(config: Config) -> LearningRate:
    """Return the schedule in samples; one iteration counts as a global batch."""
    options, total = config.optimizer, config.total_samples()

    def samples(in_iterations: int | None, in_samples: int | None, default: int) -> int:
        if in_iterations:
            return in_iterations * (config.training.global_batch_size or 1)
        return in_samples or default

    decay = samples(options.lr_decay_iters, options.lr_decay_samples, total)
    if options.lr_warmup_fraction is not None:
        warmup = int(options.lr_warmup_fraction * decay)
    else:
        warmup = samples(options.lr_warmup_iters, options.lr_warmup_samples, 0)
    return LearningRate(
        max_lr=options.lr or 0.0,
        min_lr=options.min_lr,
        warmup_init=options.lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        style=options.lr_decay_style,
        wsd_decay_samples=samples(options.lr_wsd_decay_iters, options.lr_wsd_decay_samples, 0),
        wsd_style=options.lr_wsd_decay_style,
        steps=_steps(config),
    )


def _steps(config: Config) -> tuple[tuple[int, float], ...]:
    """Return the starts, in samples, and the factors of the multi-step schedule."""
    options = config.optimizer
    starts = options.lr_multi_step_samples or ()
    if options.lr_multi_step_iters:
        batch = config.training.global_batch_size or 1
        starts = tuple(start * batch for start in options.lr_multi_step_iters)
    return tuple(zip(starts, options.lr_multi_step_factors or (), strict=True))


def weight_decay(config: Config) -> WeightDecay:
    """Return the weight decay: constant, or from `--start-weight-decay` to `--end-weight-decay`."""
    options = config.optimizer
    constant = options.weight_decay_incr_style == "constant"
    end = options.weight_decay if constant else options.end_weight_decay
    return WeightDecay(
        start=options.start_weight_decay or 0.0,
        end=end or 0.0,
        total_samples=config.total_samples(),
        style=options.weight_decay_incr_style,
    )
