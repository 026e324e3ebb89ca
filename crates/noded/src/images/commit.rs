//! A sandbox's changes become a layer.

use std::path::Path;

use super::{
    layers::{Durability, LayerMeta, Layers, Pin},
    ConfigChange, Error, ImageConfig, Result,
};

pub fn layer(
    _layers: &Layers,
    _target: &Path,
    upper: &Path,
    _uid_base: u32,
    _durability: Durability,
) -> Result<Option<(LayerMeta, Pin)>> {
    Err(Error::Uncommittable { path: upper.to_owned(), reason: "not available in this build".to_owned() })
}

/// The configuration of a committed image.
pub fn configure(mut config: ImageConfig, change: ConfigChange) -> ImageConfig {
    config.env.extend(change.env);
    config.workdir = change.workdir.or(config.workdir);
    config.user = change.user.or(config.user);
    config
}
