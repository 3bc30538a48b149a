"""DQN, SAC, TD3 and DDPG of Stable-Baselines3 with prioritized replay.

Only ``train`` differs. Each gradient step draws a batch by priority, multiplies the rows' critic losses by their
weights, and gives the rows their TD errors as new priorities. With several critics a row's priority is the mean of
their absolute errors. The actors' losses are unweighted means, as is common. On the same batches with equal weights the
networks are those of the algorithm itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.utils import polyak_update
from torch.nn import functional

from sharpwave.errors import SchemaError

from .buffer import ReplayBuffer
from .samples import PrioritizedSamples

__all__ = ["PrioritizedDDPG", "PrioritizedDQN", "PrioritizedSAC", "PrioritizedTD3"]


class PrioritizedDQN(DQN):
    """DQN with prioritized replay. Takes the arguments of ``DQN``.

    Example:
        >>> import sharpwave as sw
        >>> model = PrioritizedDQN(
        ...     "MlpPolicy",
        ...     "CartPole-v1",
        ...     replay_buffer_class=ReplayBuffer,
        ...     replay_buffer_kwargs={"sampler": sw.Prioritized()},
        ... )
    """

    def _setup_model(self) -> None:
        super()._setup_model()
        _check_buffer(self)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Makes gradient steps on batches drawn by priority."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            data = _draw(self, batch_size)
            with torch.no_grad():
                next_values = self.q_net_target(data.next_observations).max(dim=1, keepdim=True).values
                target = _td_target(data, next_values, self.gamma)
            estimate = self.q_net(data.observations).gather(1, data.actions.long())
            loss = data.weighted_mean(functional.smooth_l1_loss(estimate, target, reduction="none"))
            _step(self.policy.optimizer, loss, clip=(self.policy.parameters(), self.max_grad_norm))
            _update_priorities(self, data, [estimate], target)
            losses.append(loss.item())
        self._n_updates += gradient_steps
        _record(self, loss=losses)


class PrioritizedSAC(SAC):
    """SAC with prioritized replay. Takes the arguments of ``SAC``; see ``PrioritizedDQN``."""

    def _setup_model(self) -> None:
        super()._setup_model()
        _check_buffer(self)

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Makes gradient steps on batches drawn by priority."""
        learns_entropy = self.ent_coef_optimizer is not None
        self.policy.set_training_mode(True)
        optimizers = [self.actor.optimizer, self.critic.optimizer]
        self._update_learning_rate([*optimizers, self.ent_coef_optimizer] if learns_entropy else optimizers)
        entropy_losses, entropy_coefs, actor_losses, critic_losses = [], [], [], []
        for step in range(gradient_steps):
            data = _draw(self, batch_size)
            if self.use_sde:
                self.actor.reset_noise()
            actions, log_prob = self.actor.action_log_prob(data.observations)
            log_prob = log_prob.reshape(-1, 1)
            entropy_coef = self.log_ent_coef.detach().exp() if learns_entropy else self.ent_coef_tensor
            entropy_coefs.append(entropy_coef.item())
            if learns_entropy:
                entropy_loss = -(self.log_ent_coef * (log_prob + self.target_entropy).detach()).mean()
                _step(self.ent_coef_optimizer, entropy_loss)
                entropy_losses.append(entropy_loss.item())

            with torch.no_grad():
                next_actions, next_log_prob = self.actor.action_log_prob(data.next_observations)
                next_values = _least(self.critic_target(data.next_observations, next_actions))
                target = _td_target(data, next_values - entropy_coef * next_log_prob.reshape(-1, 1), self.gamma)
            estimates = self.critic(data.observations, data.actions)
            critic_loss = 0.5 * _weighted_mse(data, estimates, target)
            _step(self.critic.optimizer, critic_loss)
            critic_losses.append(critic_loss.item())
            _update_priorities(self, data, estimates, target)

            actor_loss = (entropy_coef * log_prob - _least(self.critic(data.observations, actions))).mean()
            _step(self.actor.optimizer, actor_loss)
            actor_losses.append(actor_loss.item())
            if step % self.target_update_interval == 0:
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
        self._n_updates += gradient_steps
        _record(
            self,
            ent_coef=entropy_coefs,
            actor_loss=actor_losses,
            critic_loss=critic_losses,
            ent_coef_loss=entropy_losses,
        )


class PrioritizedTD3(TD3):
    """TD3 with prioritized replay. Takes the arguments of ``TD3``; see ``PrioritizedDQN``."""

    def _setup_model(self) -> None:
        super()._setup_model()
        _check_buffer(self)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Makes gradient steps on batches drawn by priority."""
        _train_td3(self, gradient_steps, batch_size)


class PrioritizedDDPG(DDPG):
    """DDPG with prioritized replay. Takes the arguments of ``DDPG``; see ``PrioritizedDQN``."""

    def _setup_model(self) -> None:
        super()._setup_model()
        _check_buffer(self)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Makes gradient steps on batches drawn by priority."""
        _train_td3(self, gradient_steps, batch_size)


def _train_td3(model: Any, gradient_steps: int, batch_size: int) -> None:
    """TD3's gradient steps. DDPG is TD3 with other settings."""
    model.policy.set_training_mode(True)
    model._update_learning_rate([model.actor.optimizer, model.critic.optimizer])
    actor_losses, critic_losses = [], []
    for _ in range(gradient_steps):
        model._n_updates += 1
        data = _draw(model, batch_size)
        with torch.no_grad():
            noise = torch.empty_like(data.actions).normal_(0, model.target_policy_noise)
            noise = noise.clamp(-model.target_noise_clip, model.target_noise_clip)
            next_actions = (model.actor_target(data.next_observations) + noise).clamp(-1, 1)
            next_values = _least(model.critic_target(data.next_observations, next_actions))
            target = _td_target(data, next_values, model.gamma)
        estimates = model.critic(data.observations, data.actions)
        critic_loss = _weighted_mse(data, estimates, target)
        _step(model.critic.optimizer, critic_loss)
        critic_losses.append(critic_loss.item())
        _update_priorities(model, data, estimates, target)
        if model._n_updates % model.policy_delay:
            continue
        actor_loss = -model.critic.q1_forward(data.observations, model.actor(data.observations)).mean()
        _step(model.actor.optimizer, actor_loss)
        actor_losses.append(actor_loss.item())
        polyak_update(model.critic.parameters(), model.critic_target.parameters(), model.tau)
        polyak_update(model.actor.parameters(), model.actor_target.parameters(), model.tau)
        polyak_update(model.critic_batch_norm_stats, model.critic_batch_norm_stats_target, 1.0)
        polyak_update(model.actor_batch_norm_stats, model.actor_batch_norm_stats_target, 1.0)
    _record(model, actor_loss=actor_losses, critic_loss=critic_losses)


def _check_buffer(model: Any) -> None:
    buffer, name = model.replay_buffer, type(model).__name__
    if not isinstance(buffer, ReplayBuffer):
        raise SchemaError(
            f"{name}(): replay_buffer_class: expected ReplayBuffer or HerReplayBuffer of sharpwave.adapters.sb3, got "
            f"{type(buffer).__name__}"
        )
    if not buffer.is_prioritized:
        raise SchemaError(
            f"{name}(): sampler: expected sw.Prioritized(), got another; give replay_buffer_kwargs="
            '{"sampler": sw.Prioritized()}, or train with the algorithm of Stable-Baselines3'
        )


def _draw(model: Any, batch_size: int) -> PrioritizedSamples:
    _check_buffer(model)  # load_replay_buffer() may have brought another one
    data: PrioritizedSamples = model.replay_buffer.sample(batch_size, env=model._vec_normalize_env)
    return data


def _td_target(data: PrioritizedSamples, next_values: torch.Tensor, gamma: float) -> torch.Tensor:
    discounts = gamma if data.discounts is None else data.discounts
    return data.rewards + (1 - data.dones) * discounts * next_values


def _least(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The smallest value of the critics for each row."""
    return torch.cat(tuple(values), dim=1).min(dim=1, keepdim=True).values


def _weighted_mse(data: PrioritizedSamples, estimates: Iterable[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    losses = [data.weighted_mean(functional.mse_loss(each, target, reduction="none")) for each in estimates]
    return sum(losses[1:], losses[0])


def _update_priorities(
    model: Any, data: PrioritizedSamples, estimates: Sequence[torch.Tensor], target: torch.Tensor
) -> None:
    errors = torch.stack([(each.detach() - target).abs() for each in estimates]).mean(dim=0)
    model.replay_buffer.update_priorities(data.indices, errors)


def _step(optimizer: Any, loss: torch.Tensor, clip: tuple[Any, float] | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(*clip)
    optimizer.step()


def _record(model: Any, **values: list[float]) -> None:
    """Logs means under the algorithms' own names."""
    model.logger.record("train/n_updates", model._n_updates, exclude="tensorboard")
    for name, each in values.items():
        if each:
            model.logger.record(f"train/{name}", np.mean(each))
