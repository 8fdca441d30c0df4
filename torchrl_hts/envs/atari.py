"""Atari games as the literature plays them, as plain gymnasium environments.

The order of the steps is that of OpenAI Baselines' ``make_atari`` and ``wrap_deepmind``: no-op
starts, frame skip with max-pooling, life loss, FIRE at the start, 84x84 grey, frame stack. Rewards
are left as the game gives them: clip them in the training loop and the true score stays known.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from torchrl_hts.errors.checks import check_integer

__all__ = ["EpisodicLife", "FireOnReset", "check_atari", "make_atari", "make_atari_batch"]

Info = dict[str, Any]
Observation = np.ndarray[Any, np.dtype[np.uint8]]


class ScreenPreprocessing(AtariPreprocessing):
    """Gymnasium's preprocessing, in grey, over a game that need not observe its screen itself.

    Args:
        env: an ALE game without frame skip.
        options: those of `gymnasium.wrappers.AtariPreprocessing`.
    """

    def __init__(self, env: gym.Env[Any, Any], **options: Any) -> None:
        super().__init__(env, **options)
        screen = env.get_wrapper_attr("ale").getScreenDims()
        self.obs_buffer = [np.zeros(screen, np.uint8) for _ in range(2)]


class EpisodicLife(gym.Wrapper[Observation, int, Observation, int], RecordConstructorArgs):
    """Ends the episode when a life is lost, and plays on from there (Mnih et al. 2015).

    ``step`` returns ``terminated=True`` at the loss of a life. The next ``reset`` without a seed
    takes one no-op step into the running game; only when the game itself is over, or a seed is
    given, is it started anew. Gymnasium's own ``terminal_on_life_loss`` starts the game anew at
    each lost life, so that the agent never sees what comes after its first life.

    Args:
        env: an ALE game whose action 0 is NOOP.
    """

    def __init__(self, env: gym.Env[Observation, int]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        self._lives = 0
        self._game_over = True

    def step(self, action: int) -> tuple[Observation, Any, bool, bool, Info]:
        """One step; terminated at the end of a life as well as at the end of the game."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._game_over = terminated or truncated
        life_lost = info["lives"] < self._lives
        self._lives = info["lives"]
        return observation, reward, terminated or life_lost, truncated, info

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Observation, Info]:
        """The next life of the running game, or a new game if there is none or a seed is given."""
        if seed is None and not self._game_over:
            observation, _, terminated, truncated, info = self.env.step(0)
            if not (terminated or truncated):
                self._lives = info["lives"]
                return observation, info
        observation, info = self.env.reset(seed=seed, options=options)
        self._game_over = False
        self._lives = info["lives"]
        return observation, info


class FireOnReset(gym.Wrapper[Observation, int, Observation, int], RecordConstructorArgs):
    """Presses FIRE, then the third action, after each reset, as OpenAI Baselines does.

    Some games (Breakout) stand still until FIRE is pressed, so an agent that has not yet learned
    to press it sees nothing.

    Args:
        env: an ALE game whose actions 1 and 2 exist and whose action 1 is FIRE.
    """

    def __init__(self, env: gym.Env[Observation, int]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Observation, Info]:
        """Resets the game and starts it; anew if the two presses happen to end it."""
        observation, info = self.env.reset(seed=seed, options=options)
        for action in (1, 2):
            observation, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                # No seed: a seeded reset would end in the same way.
                observation, info = self.env.reset(options=options)
        return observation, info


def check_atari(env_id: str) -> None:
    """Find out whether ale-py is there and has such a game, without making it.

    Args:
        env_id: such as ``"ALE/Pong-v5"``.

    Raises:
        ModuleNotFoundError, ValueError, gymnasium.error.NameNotFound: as `make_atari`.
    """
    try:
        import ale_py
        import cv2  # noqa: F401  # which the preprocessing uses
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Atari games need the package that provides {error.name!r}, which is not installed: "
            "pip install 'torchrl_hts[atari]'",
            name=error.name,
        ) from error
    if not isinstance(env_id, str) or not env_id.startswith("ALE/"):
        raise ValueError(
            f"expected an id of ale-py, such as 'ALE/Pong-v5', and got {env_id!r}: "
            "prefix the name of the game with 'ALE/'"
        )
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from each executor
    gym.register_envs(ale_py)
    try:
        gym.spec(env_id)
    except gym.error.NameNotFound as error:
        if "Did you mean" in str(error):
            raise
        games = sorted(spec.name for spec in gym.registry.values() if spec.namespace == "ALE")
        raise gym.error.NameNotFound(f"{error} Its games are {', '.join(games)}") from error


def make_atari(
    env_id: str = "ALE/Pong-v5",
    *,
    frame_stack: int = 4,
    noop_max: int = 30,
    terminal_on_life_loss: bool = False,
    fire_on_reset: bool = True,
    sticky_actions: bool = False,
    frame_skip: int = 4,
    screen_size: int = 84,
    render_mode: str | None = None,
) -> gym.Env[Observation, int]:
    """Builds an Atari game with the preprocessing of the literature; never imports torch.

    Observations are uint8 of shape ``[frame_stack, screen_size, screen_size]``, the newest frame
    last. The stacked frames are the channels, so this is the ``[C, H, W]`` that ``Conv2d`` takes;
    divide by 255 inside the network and the storage stays a quarter of float32's.

    OpenCV is set to one thread in the calling process: many executors share the cores, and
    resizing one small frame gains nothing from more.

    Args:
        env_id: an id of ale-py, such as ``"ALE/Breakout-v5"``.
        frame_stack: frames per observation.
        noop_max: each game starts with 1 to ``noop_max`` no-op frames, chosen from the seed; 0 for
            none.
        terminal_on_life_loss: each life is an episode of its own (see `EpisodicLife`). Episode
            returns are then per life.
        fire_on_reset: press FIRE at the start, in games that have it (see `FireOnReset`).
        sticky_actions: repeat the last action with probability 0.25 (Machado et al. 2018) instead
            of never.
        frame_skip: emulator frames per step; the observation is the maximum of the last two.
        screen_size: height and width of a frame, in pixels.
        render_mode: ``"rgb_array"`` or ``"human"``, as in gymnasium.

    Raises:
        ModuleNotFoundError: ale-py or OpenCV is not installed.
        ValueError: ``env_id`` is not an id of ale-py.
        gymnasium.error.NameNotFound: ale-py has no such game.

    >>> env = make_atari("ALE/Pong-v5")
    >>> observation, info = env.reset(seed=0)
    >>> observation.shape, observation.dtype
    ((4, 84, 84), dtype('uint8'))
    """
    check_atari(env_id)
    import cv2

    cv2.setNumThreads(1)
    env: gym.Env[Any, Any] = gym.make(
        env_id,
        # The preprocessing skips frames itself and reads its screens from the emulator: what the
        # base environment observes is thrown away, and the memory is cheaper than any picture.
        frameskip=1,
        obs_type="ram",
        repeat_action_probability=0.25 if sticky_actions else 0.0,
        render_mode=render_mode,
        disable_env_checker=True,  # it costs time at every frame
    )
    env = ScreenPreprocessing(
        env, noop_max=noop_max, frame_skip=frame_skip, screen_size=screen_size
    )
    if terminal_on_life_loss:
        env = EpisodicLife(env)
    meanings = env.get_wrapper_attr("get_action_meanings")()
    if fire_on_reset and len(meanings) >= 3 and meanings[1] == "FIRE":
        env = FireOnReset(env)
    return FrameStackObservation(env, frame_stack)


def make_atari_batch(
    env_id: str = "ALE/Pong-v5",
    num_envs: int = 16,
    *,
    frame_stack: int = 4,
    noop_max: int = 30,
    fire_on_reset: bool = True,
    sticky_actions: bool = False,
    frame_skip: int = 4,
    screen_size: int = 84,
    num_threads: int = 1,
) -> VectorEnv[Any, Any, Any]:
    """Builds a batch of games that step as one: ale_py's ``AtariVectorEnv``, all of it C++.

    Spaces, rewards and frames are those of `make_atari`. What differs is how a game starts. The
    frames before its first one are black. FIRE is pressed alone, without the third action. And a
    seed draws another number of no-op frames. A life can't be an episode: ale_py starts the game
    anew at each lost life. Games can't be saved either: where a run is resumed they begin new
    episodes (docs/how_to/batches_of_environments.md says when to use which).

    Args:
        env_id: an id of ale-py, such as ``"ALE/Breakout-v5"``.
        num_envs: games, k. Observations of all are ``[k, frame_stack, screen_size, screen_size]``.
        frame_stack: frames per observation.
        noop_max: most no-op frames at the start of a game.
        fire_on_reset: press FIRE at the start, in games that have it.
        sticky_actions: repeat the last action with probability 0.25 instead of never.
        frame_skip: emulator frames per step; the observation is the maximum of the last two.
        screen_size: height and width of a frame, in pixels.
        num_threads: that step the games. Give `HTSCollector` a batch for each core rather than a
            batch a thread for each. 0: one for each core.

    Raises:
        ModuleNotFoundError, gymnasium.error.NameNotFound: as `make_atari`.
        TypeError, ValueError: as `make_atari`, and if a number is no integer or too small.

    >>> envs = make_atari_batch("ALE/Pong-v5", num_envs=2)
    >>> observations, infos = envs.reset(seed=0)
    >>> observations.shape, observations.dtype
    ((2, 4, 84, 84), dtype('uint8'))
    >>> envs.close()
    """
    check_atari(env_id)
    # Of other numbers the process may die, or never come back.
    num_envs = check_integer("num_envs", num_envs)
    num_threads = check_integer("num_threads", num_threads, least=0)
    frame_stack = check_integer("frame_stack", frame_stack)
    frame_skip = check_integer("frame_skip", frame_skip)
    screen_size = check_integer("screen_size", screen_size)
    noop_max = check_integer("noop_max", noop_max, least=0)
    from ale_py.vector_env import AtariVectorEnv

    spec = gym.spec(env_id)
    return AtariVectorEnv(
        spec.kwargs["game"],
        num_envs,
        num_threads=num_threads,
        autoreset_mode=AutoresetMode.NEXT_STEP,  # infos are those of the last step then
        repeat_action_probability=0.25 if sticky_actions else 0.0,
        img_height=screen_size,
        img_width=screen_size,
        stack_num=frame_stack,
        frameskip=frame_skip,
        noop_max=noop_max,
        reward_clipping=False,
        use_fire_reset=fire_on_reset,
    )
