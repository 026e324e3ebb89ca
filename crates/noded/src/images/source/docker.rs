//! What `docker save` writes: a tar with `manifest.json`, configurations and layers.

use serde::Deserialize;

use super::{
    archive::Archive,
    config,
    layer::{self, Promise},
    stack, stream, Imported,
};
use crate::images::{layers::Layers, Error, Result};

const MANIFEST: &str = "manifest.json";
const MAX_DOCUMENT: u64 = 8 << 20;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Image {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Imports the image tagged `tag`, or the only one.
pub fn import(archive: &Archive, tag: Option<&str>, layers: &Layers) -> Result<Imported> {
    let label = format!("{}: {MANIFEST}", archive.name());
    let text = stream::read_small(archive.member(MANIFEST)?, MAX_DOCUMENT, &label)?;
    let images: Vec<Image> = serde_json::from_slice(&text).map_err(|error| {
        Error::malformed(&label, "a list of images (JSON), as `docker save` writes it", error.to_string())
    })?;
    let tags = |image: &Image| image.repo_tags.clone().unwrap_or_default();
    let image = match (tag, &images[..]) {
        (None, [only]) => only,
        (None, several) => {
            let found = format!("{} images: {:?}", several.len(), several.iter().flat_map(tags).collect::<Vec<_>>());
            return Err(Error::malformed(label, "one image, or to be told which (PATH:TAG)", found));
        }
        (Some(tag), images) => {
            let fits = |of: &String| of == tag || of.rsplit_once(':').is_some_and(|(_, short)| short == tag);
            images.iter().find(|image| tags(image).iter().any(fits)).ok_or_else(|| {
                let found = format!("{:?}", images.iter().flat_map(tags).collect::<Vec<_>>());
                Error::malformed(&label, format!("an image called {tag:?}"), found)
            })?
        }
    };
    let config_label = format!("{}: {}", archive.name(), image.config);
    let config_text = stream::read_small(archive.member(&image.config)?, MAX_DOCUMENT, &config_label)?;
    let (config, diff_ids) = config::parse(&config_label, &config_text)?;
    if diff_ids.len() != image.layers.len() || diff_ids.is_empty() {
        let found = format!("{} for {} layers", diff_ids.len(), image.layers.len());
        return Err(Error::malformed(config_label, "one diff id for each layer, and at least one", found));
    }
    let mut stacked = Vec::new();
    for (member, diff_id) in image.layers.iter().zip(&diff_ids) {
        let label = format!("{}: {member}", archive.name());
        let promise = Promise { blob: None, diff_id: Some(diff_id) };
        let layer = layer::obtain(layers, &label, promise, || archive.member(member))?;
        stack(layers, &mut stacked, layer)?;
    }
    Ok(Imported { layers: stacked, config, suggested_name: tags(image).into_iter().next() })
}
