"""Sections of the jobs' configs: all fields, defaults and bounds. Imports no torch; `t2g.configio` reads the files.

A default that depends on another field is resolved by a validator, so that the resolved config has no holes.
"""

from t2g.sections.common import (
    AlarmConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    Dtype,
    EvalConfig,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    RoleConfig,
    RunConfig,
    Section,
    WorldConfig,
)
from t2g.sections.feedback import (
    SOURCES,
    AnnotateConfig,
    EngineConfig,
    FeedbackConfig,
    HealthConfig,
    LLMConfig,
    NoiseConfig,
    RewardEngineConfig,
    RolloutConfig,
    SandboxConfig,
    StyleConfig,
    WorkersConfig,
)
from t2g.sections.learning import (
    BFLOAT16_PROBE_TOLERANCE,
    FLOAT32_PROBE_TOLERANCE,
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    OptimConfig,
    Placement,
    RewardRuleConfig,
    Schedule,
    SFTLoRAConfig,
    SFTOptions,
    Transport,
    with_probe_tolerance,
)
