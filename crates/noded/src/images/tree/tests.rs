//! Trees as programs in a sandbox can make them.

use std::{
    fs,
    os::unix::fs::{chown, lchown, symlink, MetadataExt, PermissionsExt},
    path::PathBuf,
};

use super::*;

const BASE: u32 = 0x4000_0000;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

#[test]
fn removal_has_no_depth_limit() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().join("top");
    fs::create_dir(&top).unwrap();
    let mut at = open_root(&top).unwrap();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
        rustix::fs::symlinkat("/", &at, "l").unwrap();
        at = rustix::fs::openat(&at, "d", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    }
    assert!(digest(&open_root(&top).unwrap(), &top).is_err(), "too deep for a layer");
    remove(&top).unwrap();
    assert!(!top.exists());
    remove(&top).unwrap();
}

#[test]
fn removal_does_not_follow_links() {
    let place = tempfile::tempdir().unwrap();
    let (keep, link) = (place.path().join("keep"), place.path().join("link"));
    fs::create_dir(&keep).unwrap();
    fs::write(keep.join("f"), "").unwrap();
    symlink(&keep, &link).unwrap();
    remove(&link).unwrap();
    assert!(!link.exists() && keep.join("f").exists());
}

#[test]
fn owners_are_shifted_once_and_special_bits_stay() {
    if !is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("upper");
    fs::create_dir(&root).unwrap();
    for (name, id) in [("a", BASE + 1000), ("b", BASE), ("zero", 0)] {
        fs::write(root.join(name), "x").unwrap();
        chown(root.join(name), Some(id), Some(id)).unwrap();
    }
    fs::hard_link(root.join("a"), root.join("a2")).unwrap();
    symlink("nowhere", root.join("l")).unwrap();
    lchown(root.join("l"), Some(BASE + 5), Some(BASE + 6)).unwrap();
    fs::set_permissions(root.join("b"), fs::Permissions::from_mode(0o6755)).unwrap();
    rustix::fs::lsetxattr(root.join("a"), "trusted.overlay.origin", b"x", rustix::fs::XattrFlags::empty()).unwrap();
    rustix::fs::lsetxattr(&root, "trusted.overlay.opaque", b"y", rustix::fs::XattrFlags::empty()).unwrap();
    shift_owners(&open_root(&root).unwrap(), &root, BASE).unwrap();
    let owner = |name: &str| {
        let metadata = fs::symlink_metadata(root.join(name)).unwrap();
        (metadata.uid(), metadata.gid())
    };
    assert_eq!(
        [owner("a"), owner("a2"), owner("b"), owner("zero"), owner("l")],
        [(1000, 1000), (1000, 1000), (0, 0), (0, 0), (5, 6)]
    );
    assert_eq!(fs::metadata(root.join("b")).unwrap().mode() & 0o7777, 0o6755);
    let mut value = [0; 8];
    assert!(rustix::fs::lgetxattr(root.join("a"), "trusted.overlay.origin", &mut value).is_err());
    assert!(rustix::fs::lgetxattr(&root, "trusted.overlay.opaque", &mut value).is_ok());

    chown(root.join("a"), Some(BASE * 2), None).unwrap();
    assert!(shift_owners(&open_root(&root).unwrap(), &root, BASE).is_err(), "another sandbox's file");
}

fn sample(place: &tempfile::TempDir) -> PathBuf {
    let root = place.path().join("sample");
    fs::create_dir_all(root.join("d/e")).unwrap();
    fs::write(root.join("d/f"), "content").unwrap();
    fs::hard_link(root.join("d/f"), root.join("again")).unwrap();
    symlink("../x", root.join("d/l")).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    std::os::unix::fs::FileExt::write_at(&sparse, b"end", 1 << 39).unwrap();
    root
}

#[test]
fn a_copy_has_the_same_digest() {
    let place = tempfile::tempdir().unwrap();
    let root = sample(&place);
    let copied = place.path().join("copy");
    copy(&root, &copied, Origin::Folder, 1 << 30).unwrap();
    let digest_of = |path: &PathBuf| digest(&open_root(path).unwrap(), path).unwrap();
    let (original, copy) = (digest_of(&root), digest_of(&copied));
    assert_eq!(original, copy);
    assert_eq!(original.entries, 7);
    assert!(original.size_bytes < 1 << 20, "holes are no content");
    assert_eq!(fs::metadata(copied.join("again")).unwrap().nlink(), 2);

    fs::write(copied.join("d/f"), "CONTENT").unwrap();
    assert_ne!(digest_of(&copied).digest, original.digest);
}

#[test]
fn a_copy_has_a_limit_and_leaves_out_nodes() {
    let place = tempfile::tempdir().unwrap();
    let root = sample(&place);
    let error = copy(&root, &place.path().join("small"), Origin::Folder, 3).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    if !is_root() {
        return;
    }
    rustix::fs::mknodat(rustix::fs::CWD, root.join("node"), FileType::CharacterDevice, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    let folder = copy(&root, &place.path().join("folder"), Origin::Folder, 1 << 30).unwrap();
    assert!(folder.warnings[0].contains("node") && !place.path().join("folder/node").exists());
    copy(&root, &place.path().join("upper"), Origin::Upper, 1 << 30).unwrap();
    assert!(fs::symlink_metadata(place.path().join("upper/node")).is_ok(), "a whiteout is part of an upper");
}
