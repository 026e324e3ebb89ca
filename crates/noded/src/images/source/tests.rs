//! Whole imports: each format, the same content, and files that are not what they should be.

use std::{fs, io::Write, path::Path};

use sha2::{Digest, Sha256};

use super::*;
use crate::images::{layers::hex, unpack::tests::Archive};

struct Place {
    dir: tempfile::TempDir,
    layers: Layers,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    for name in ["layers", "staging", "in"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let layers = Layers::new(dir.path().join("layers"), dir.path().join("staging"));
    Place { dir, layers }
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("in").join(name)
    }

    fn import(&self, name: &str) -> Result<Imported> {
        let imported = import(&self.path(name), Format::Auto, &self.layers);
        let left = fs::read_dir(self.dir.path().join("staging")).unwrap().count();
        assert_eq!(left, 0, "staging is empty after every import, good or bad");
        imported
    }

    fn refusal(&self, name: &str) -> String {
        self.import(name).unwrap_err().to_string()
    }
}

fn sha(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn rootfs() -> Vec<u8> {
    Archive::default().dir("bin").file("bin/sh", "#!").bytes()
}

fn top() -> Vec<u8> {
    Archive::default().file("bin/.wh.sh", "").file("app", "1").bytes()
}

fn config_of(layers: &[Vec<u8>]) -> Vec<u8> {
    let diff_ids: Vec<String> = layers.iter().map(|layer| sha(layer)).collect();
    serde_json::json!({"architecture": architecture(), "os": "linux", "config": {"Env": ["A=1"], "WorkingDir": "/app"},
        "rootfs": {"type": "layers", "diff_ids": diff_ids}})
    .to_string()
    .into_bytes()
}

/// Writes an OCI layout whose layers are stored as `pack` makes them.
fn layout(dir: &Path, layers: &[Vec<u8>], pack: impl Fn(&[u8]) -> Vec<u8>) {
    fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
    let blob = |bytes: &[u8]| {
        let digest = sha(bytes);
        fs::write(dir.join(oci::blob_path(&digest)), bytes).unwrap();
        digest
    };
    let packed: Vec<_> = layers.iter().map(|layer| serde_json::json!({"digest": blob(&pack(layer))})).collect();
    let config = blob(&config_of(layers));
    let manifest = blob(serde_json::json!({"config": {"digest": config}, "layers": packed}).to_string().as_bytes());
    let index = serde_json::json!({"manifests": [{"digest": manifest,
        "annotations": {"org.opencontainers.image.ref.name": "one"}}]});
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn docker_archive(layers: &[Vec<u8>], link: Option<&str>) -> Vec<u8> {
    let config = config_of(layers);
    let names: Vec<String> =
        (0..layers.len()).map(|index| format!("{}/layer.tar", index.to_string().repeat(64))).collect();
    let manifest =
        serde_json::json!([{"Config": format!("{}.json", "c".repeat(64)), "RepoTags": ["it:1"], "Layers": names}])
            .to_string();
    let mut builder = ::tar::Builder::new(Vec::new());
    let mut add = |name: &str, data: &[u8]| {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, data).unwrap();
    };
    for (name, layer) in names.iter().zip(layers) {
        add(if link.is_some() { "blobs/shared" } else { name }, layer);
    }
    add(&format!("{}.json", "c".repeat(64)), &config);
    add("manifest.json", manifest.as_bytes());
    if let Some(target) = link {
        let mut header = ::tar::Header::new_gnu();
        header.set_entry_type(::tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, &names[0], target).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn every_format_gives_the_same_layers() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let place = place();
    let layers = [rootfs(), top()];
    let digests = |imported: &Imported| imported.layers.iter().map(|(meta, _)| meta.digest.clone()).collect::<Vec<_>>();
    let expected = vec![sha(&layers[0]), sha(&layers[1])];
    layout(&place.path("plain"), &layers, <[u8]>::to_vec);
    layout(&place.path("gzip"), &layers, gzip);
    layout(&place.path("zstd"), &layers, |layer| zstd::encode_all(layer, 1).unwrap());
    fs::write(place.path("docker.tar"), docker_archive(&layers, None)).unwrap();
    fs::write(place.path("docker.tar.gz"), gzip(&docker_archive(&layers, None))).unwrap();
    let mut builder = ::tar::Builder::new(fs::File::create(place.path("oci.tar")).unwrap());
    builder.append_dir_all(".", place.path("zstd")).unwrap();
    builder.finish().unwrap();
    for name in ["plain", "gzip", "zstd", "docker.tar", "docker.tar.gz", "oci.tar"] {
        let imported = place.import(name).unwrap();
        assert_eq!(digests(&imported), expected, "{name}");
        assert_eq!(imported.config.workdir.as_deref(), Some("/app"), "{name}");
        let suggested = if name.starts_with("docker") { "it:1" } else { "one" };
        assert_eq!(imported.suggested_name.as_deref(), Some(suggested), "{name}");
    }
    fs::write(place.path("root.tar"), &layers[0]).unwrap();
    fs::write(place.path("root.tar.zst"), zstd::encode_all(&layers[0][..], 1).unwrap()).unwrap();
    for name in ["root.tar", "root.tar.zst"] {
        assert_eq!(digests(&place.import(name).unwrap()), expected[..1], "{name}");
    }
    let folder = place.layers.tree(&expected[0]);
    let imported = import(&folder, Format::Auto, &place.layers).unwrap();
    assert_eq!(imported.layers.len(), 1);
    assert_eq!(fs::read_to_string(place.layers.tree(&imported.layers[0].0.digest).join("bin/sh")).unwrap(), "#!");
}

#[test]
fn members_of_a_docker_archive_may_be_links() {
    let place = place();
    fs::write(place.path("a.tar"), docker_archive(&[rootfs()], Some("../blobs/shared"))).unwrap();
    fs::write(place.path("b.tar"), docker_archive(&[top()], Some("../../../../etc/passwd"))).unwrap();
    if rustix::process::geteuid().is_root() {
        assert_eq!(place.import("a.tar").unwrap().layers.len(), 1);
    }
    assert!(place.refusal("b.tar").contains("none of that name"));
}

#[test]
fn digests_are_verified() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let place = place();
    let layer = rootfs();
    layout(&place.path("changed"), std::slice::from_ref(&layer), gzip);
    let blob = place.path("changed").join(oci::blob_path(&sha(&gzip(&layer))));
    fs::write(&blob, gzip(&top())).unwrap();
    let error = place.refusal("changed");
    assert!(
        error.contains(&sha(&gzip(&layer))) && error.contains(blob.file_name().unwrap().to_str().unwrap()),
        "{error}"
    );
    // The right blob, but another tar in it than the configuration says.
    fs::write(place.path("lies.tar"), {
        let mut archive = docker_archive(std::slice::from_ref(&layer), None);
        let at = archive.windows(2).position(|pair| pair == b"#!").unwrap();
        archive[at] = b'?';
        archive
    })
    .unwrap();
    assert!(place.refusal("lies.tar").contains("its digest is"));
    assert_eq!(fs::read_dir(place.dir.path().join("layers")).unwrap().count(), 0);
}

#[test]
fn errors_name_the_file_and_what_was_expected() {
    let place = place();
    fs::write(place.path("text"), "hello world").unwrap();
    fs::write(place.path("noise"), vec![7; 4096]).unwrap();
    fs::write(place.path("root.tar.xz"), b"\xfd7zXZ\0\0").unwrap();
    fs::write(place.path("cut.tar.gz"), &gzip(&rootfs())[..60]).unwrap();
    fs::write(place.path("cut.tar"), &rootfs()[..1024]).unwrap();
    fs::write(place.path("empty.tar"), vec![0; 1024]).unwrap();
    fs::create_dir(place.path("empty")).unwrap();
    fs::create_dir(place.path("layout")).unwrap();
    fs::write(place.path("layout/oci-layout"), "{}").unwrap();
    for (name, expected) in [
        ("missing", "cannot read"),
        ("text", "tar"),
        ("noise", "expected an OCI layout, a docker archive"),
        ("root.tar.xz", "xz -d"),
        ("cut.tar.gz", "whole and intact"),
        ("cut.tar", "cut off"),
        ("empty.tar", "an empty archive"),
        ("empty", "an empty directory"),
        ("layout", "index.json"),
    ] {
        let error = place.refusal(name);
        assert!(error.contains(name) && error.contains(expected), "{name}: {error}");
    }
}

#[test]
fn a_tag_can_follow_the_path() {
    let place = place();
    layout(&place.path("l"), &[rootfs()], <[u8]>::to_vec);
    assert_eq!(split_tag(&place.path("l:one")), (place.path("l"), Some("one".to_owned())));
    assert_eq!(split_tag(&place.path("l:a:b")), (place.path("l"), Some("a:b".to_owned())));
    assert_eq!(split_tag(&place.path("nothing:one")), (place.path("nothing:one"), None));
    assert!(place.refusal("l:two").contains("two"));
}

#[test]
fn a_layer_counts_once_and_an_opaque_root_hides_all_below() {
    let place = place();
    let meta = |digit: &str, opaque_root| LayerMeta {
        digest: format!("sha256:{}", digit.repeat(64)),
        entries: 1,
        opaque_root,
        ..LayerMeta::default()
    };
    let mut stacked = Vec::new();
    for (digit, opaque) in [("a", false), ("b", false), ("a", false)] {
        let meta = meta(digit, opaque);
        let pin = place.layers.pin(&meta.digest);
        stack(&place.layers, &mut stacked, (meta, pin)).unwrap();
    }
    let order: Vec<&str> = stacked.iter().map(|(meta, _)| &meta.digest[7..8]).collect();
    assert_eq!(order, ["b", "a"]);
    let meta = meta("c", true);
    let pin = place.layers.pin(&meta.digest);
    stack(&place.layers, &mut stacked, (meta, pin)).unwrap();
    assert_eq!(stacked.len(), 1);
}

#[test]
fn layers_are_fitted_to_what_lies_below() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let place = place();
    let base = Archive::default().sticky_dir("tmp").file("bin/sh", "").bytes();
    // No member for its directories, and whiteouts of which one hides nothing.
    let top = Archive::default()
        .file("tmp/f", "")
        .file("bin/.wh.sh", "")
        .file("new/.wh.nothing", "")
        .file("new/f", "")
        .bytes();
    layout(&place.path("l"), &[base, top.clone()], <[u8]>::to_vec);
    let imported = place.import("l").unwrap();
    let fitted = &imported.layers[1].0.digest;
    assert_ne!(*fitted, sha(&top));
    let root = place.layers.tree(fitted);
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(root.join("tmp")).unwrap()) & 0o7777, 0o1777);
    assert!(fs::symlink_metadata(root.join("bin/sh")).is_ok(), "hides what is below");
    assert!(fs::symlink_metadata(root.join("new/nothing")).is_err(), "overlayfs would show it");
    assert!(root.join("new/f").exists());
    assert_eq!(place.import("l").unwrap().layers[1].0.digest, *fitted);
    assert!(
        fs::symlink_metadata(place.layers.tree(&sha(&top)).join("new/nothing")).is_ok(),
        "the layer itself is as it was"
    );
}
