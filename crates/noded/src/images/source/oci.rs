//! OCI images: from an index over manifests to layers.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{
    architecture, config,
    layer::{self, Promise},
    stack, stream, Imported,
};
use crate::images::{
    layers::{hex, hex_of, Layers, DIGEST_PREFIX},
    Error, Result,
};

/// Indexes, manifests and configurations are small documents.
const MAX_DOCUMENT: u64 = 8 << 20;
/// An index may point to an index; more of them is a loop, or a joke.
const MAX_NESTING: usize = 4;
/// Layers of one image that are read and unpacked at the same time.
const AT_ONCE: usize = 4;
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Where the pieces of OCI images lie. What comes out is verified by who reads it.
pub trait Blobs: Sync {
    /// The index that everything starts from.
    fn index(&self) -> Result<Box<dyn Read + Send + '_>>;
    /// A blob by its digest, which has been checked to be a sha256.
    fn blob(&self, digest: &str) -> Result<Box<dyn Read + Send + '_>>;
    /// A manifest, which a registry keeps apart from blobs.
    fn manifest(&self, digest: &str) -> Result<Box<dyn Read + Send + '_>> {
        self.blob(digest)
    }
    /// What it is called in errors.
    fn label(&self) -> String;
    /// The layers that will be read, with their sizes in bytes.
    fn expect(&self, _layers: &[(&str, u64)]) {}
    /// A layer is in the store.
    fn done(&self, _digest: &str) {}
}

/// A layout on disk.
#[derive(Debug)]
pub struct Layout {
    dir: PathBuf,
}

impl Layout {
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    fn open(&self, name: &str) -> Result<Box<dyn Read + Send + '_>> {
        let path = self.dir.join(name);
        let file = File::open(&path).map_err(|source| Error::Unreadable { path, source })?;
        Ok(Box::new(file))
    }
}

impl Blobs for Layout {
    fn index(&self) -> Result<Box<dyn Read + Send + '_>> {
        self.open("index.json")
    }

    fn blob(&self, digest: &str) -> Result<Box<dyn Read + Send + '_>> {
        self.open(&blob_path(digest))
    }

    fn label(&self) -> String {
        self.dir.display().to_string()
    }
}

/// Where a layout keeps a blob.
pub fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

/// An index or a manifest: which, its fields tell.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Document {
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Platform {
    os: String,
    architecture: String,
}

/// Imports the image called `tag`, or the only one.
pub fn import(blobs: &dyn Blobs, tag: Option<&str>, layers: &Layers) -> Result<Imported> {
    let label = format!("{}: index.json", blobs.label());
    let text = stream::read_small(blobs.index()?, MAX_DOCUMENT, &label)?;
    let mut document = parse(&label, &text)?;
    let mut name = None;
    let mut tag = tag;
    for _ in 0..MAX_NESTING {
        let Some(manifests) = document.manifests.take() else { break };
        let chosen = choose(&label, &manifests, tag.take())?;
        name = name.or(chosen.annotations.as_ref().and_then(|notes| notes.get(REF_NAME)).cloned());
        check_digest(blobs, &chosen.digest, "a manifest")?;
        let text = document_of(blobs, &chosen.digest, blobs.manifest(&chosen.digest)?)?;
        document = parse(&blob_label(blobs, &chosen.digest), &text)?;
    }
    let (Some(config_of), Some(layers_of)) = (document.config, document.layers) else {
        return Err(Error::malformed(label, "an index that leads to an image manifest", "none"));
    };
    let config_label = blob_label(blobs, &config_of.digest);
    check_digest(blobs, &config_of.digest, "a configuration")?;
    let text = document_of(blobs, &config_of.digest, blobs.blob(&config_of.digest)?)?;
    let (config, diff_ids) = config::parse(&config_label, &text)?;
    if diff_ids.len() != layers_of.len() {
        let found = format!("{} for {} layers", diff_ids.len(), layers_of.len());
        return Err(Error::malformed(config_label, "one diff id for each layer", found));
    }
    for layer in &layers_of {
        check_digest(blobs, &layer.digest, "a layer")?;
    }
    let expected: Vec<(&str, u64)> = layers_of.iter().map(|layer| (layer.digest.as_str(), layer.size)).collect();
    blobs.expect(&expected);
    let mut stacked = Vec::new();
    for layer in at_once(&layers_of, &diff_ids, |digest, diff_id| {
        let promise = Promise { blob: Some(digest), diff_id: Some(diff_id) };
        let layer = layer::obtain(layers, &blob_label(blobs, digest), promise, || blobs.blob(digest))?;
        blobs.done(digest);
        Ok(layer)
    })? {
        stack(layers, &mut stacked, layer)?;
    }
    if stacked.is_empty() {
        return Err(Error::malformed(label, "an image with at least one layer", "one without"));
    }
    Ok(Imported { layers: stacked, config, suggested_name: name })
}

/// One manifest of an index: the one with the tag, else the one for this machine, else the only one.
fn choose(label: &str, manifests: &[Descriptor], tag: Option<&str>) -> Result<Descriptor> {
    let name = |descriptor: &Descriptor| descriptor.annotations.as_ref().and_then(|notes| notes.get(REF_NAME)).cloned();
    let names = || manifests.iter().filter_map(name).collect::<Vec<_>>();
    let is_attestation = |descriptor: &Descriptor| {
        let unknown = descriptor.platform.as_ref().is_some_and(|platform| platform.os == "unknown");
        let notes = descriptor.annotations.as_ref();
        unknown || notes.is_some_and(|notes| notes.contains_key("vnd.docker.reference.type"))
    };
    let mut candidates: Vec<&Descriptor> = manifests.iter().filter(|descriptor| !is_attestation(descriptor)).collect();
    if let Some(tag) = tag {
        candidates.retain(|descriptor| {
            name(descriptor).is_some_and(|name| name == tag || name.ends_with(&format!(":{tag}")))
        });
        if candidates.is_empty() {
            return Err(Error::malformed(label, format!("an image called {tag:?}"), format!("{:?}", names())));
        }
    }
    let here = Platform { os: "linux".to_owned(), architecture: architecture().to_owned() };
    let for_here: Vec<&&Descriptor> = candidates
        .iter()
        .filter(|descriptor| descriptor.platform.as_ref().is_none_or(|platform| *platform == here))
        .collect();
    match for_here[..] {
        [only] => Ok((*only).clone()),
        [] => {
            let platform = |descriptor: &&Descriptor| {
                descriptor.platform.as_ref().map(|platform| format!("{}/{}", platform.os, platform.architecture))
            };
            let there: Vec<String> = candidates.iter().filter_map(platform).collect();
            Err(Error::malformed(label, format!("an image for linux/{}", here.architecture), format!("{there:?}")))
        }
        // The same manifest under several names is one image.
        [first, ..] if for_here.iter().all(|other| other.digest == first.digest) => Ok((*first).clone()),
        // Variants of one architecture: the first is the most common one.
        [first, ..] if for_here.iter().all(|other| other.platform.is_some() && name(other).is_none()) => {
            Ok((*first).clone())
        }
        _ => Err(Error::malformed(
            label,
            "one image, or to be told which (PATH:TAG)",
            format!("{} images: {:?}", for_here.len(), names()),
        )),
    }
}

fn parse(label: &str, text: &[u8]) -> Result<Document> {
    serde_json::from_slice(text)
        .map_err(|error| Error::malformed(label, "an OCI index or manifest (JSON)", error.to_string()))
}

/// Runs `obtain` for each layer, several at the same time. The results are in the layers' order; after an error no layer begins.
fn at_once<T: Send>(
    layers: &[Descriptor],
    diff_ids: &[String],
    obtain: impl Fn(&str, &str) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let (Some(layer), Some(diff_id)) = (layers.get(number), diff_ids.get(number)) else { break };
            let outcome = obtain(&layer.digest, diff_id);
            failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
            done.push((number, outcome));
        }
        done
    };
    let mut all = std::thread::scope(|scope| {
        let others: Vec<_> = (1..AT_ONCE.min(layers.len())).map(|_| scope.spawn(work)).collect();
        let mut all = work();
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        all
    });
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, outcome)| outcome).collect()
}

/// A small document, verified.
fn document_of(blobs: &dyn Blobs, digest: &str, reader: impl Read) -> Result<Vec<u8>> {
    let label = blob_label(blobs, digest);
    let text = stream::read_small(reader, MAX_DOCUMENT, &label)?;
    let found = format!("{DIGEST_PREFIX}{}", hex(&Sha256::digest(&text)));
    if found != digest {
        return Err(Error::DigestMismatch { file: label, expected: digest.to_owned(), found });
    }
    Ok(text)
}

fn check_digest(blobs: &dyn Blobs, digest: &str, what: &str) -> Result<()> {
    match hex_of(digest) {
        Some(_) => Ok(()),
        None => Err(Error::malformed(blobs.label(), format!("a sha256 digest of {what}"), format!("{digest:?}"))),
    }
}

fn blob_label(blobs: &dyn Blobs, digest: &str) -> String {
    format!("{}: {}", blobs.label(), blob_path(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(digest: &str, platform: Option<(&str, &str)>, name: Option<&str>) -> Descriptor {
        Descriptor {
            digest: digest.to_owned(),
            platform: platform.map(|(os, arch)| Platform { os: os.to_owned(), architecture: arch.to_owned() }),
            annotations: name.map(|name| BTreeMap::from([(REF_NAME.to_owned(), name.to_owned())])),
            ..Descriptor::default()
        }
    }

    #[test]
    fn this_machine_s_manifest_is_chosen() {
        let index = [
            descriptor("other", Some(("linux", "s390x")), None),
            descriptor("mine", Some(("linux", architecture())), None),
            descriptor("windows", Some(("windows", architecture())), None),
            descriptor("proof", Some(("unknown", "unknown")), None),
        ];
        assert_eq!(choose("i", &index, None).unwrap().digest, "mine");
        let error = choose("i", &index[..1], None).unwrap_err().to_string();
        assert!(error.contains("linux/s390x"), "{error}");
    }

    #[test]
    fn several_names_need_a_tag() {
        let index = [descriptor("a", None, Some("one")), descriptor("b", None, Some("two"))];
        assert!(choose("i", &index, None).unwrap_err().to_string().contains("PATH:TAG"));
        assert_eq!(choose("i", &index, Some("two")).unwrap().digest, "b");
        assert!(choose("i", &index, Some("three")).is_err());
    }
}
