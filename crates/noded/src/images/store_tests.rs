//! The store as noded uses it: across restarts, with holders, and under real overlays. These tests need root.

use std::{
    ffi::CString,
    fs,
    os::unix::fs::{chown, FileTypeExt, MetadataExt},
    path::Path,
};

use rustix::{
    fs::{Mode, XattrFlags, CWD},
    mount::{
        fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, FsMountFlags, FsOpenFlags,
        MountAttrFlags,
    },
};

use super::*;
use crate::images::{unpack::tests::Archive, ConfigChange, ImageConfig};

const BASE: u32 = 0x4000_0000;

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        Some(Self { dir: tempfile::tempdir().unwrap() })
    }

    fn open(&self) -> Store {
        let store = Store::open(&self.dir.path().join("images"), Options::default()).unwrap();
        // Its thread works in `staging`, which the tests look at.
        let _ = store.resolve("host");
        store
    }

    fn tar(&self, name: &str, archive: Archive) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, archive.bytes()).unwrap();
        path
    }

    fn layers(&self) -> usize {
        fs::read_dir(self.dir.path().join("images/layers")).unwrap().count()
    }

    fn upper(&self, name: &str) -> PathBuf {
        let upper = self.dir.path().join(name);
        fs::create_dir(&upper).unwrap();
        chown(&upper, Some(BASE), Some(BASE)).unwrap();
        upper
    }

    fn put(&self, path: &Path, content: &str, id: u32) {
        fs::write(path, content).unwrap();
        chown(path, Some(BASE + id), Some(BASE + id)).unwrap();
    }
}

/// An overlay over an image's root, seen through a descriptor; gone when dropped.
fn overlay(image: &ResolvedImage, writable: Option<(&Path, &Path)>) -> std::os::fd::OwnedFd {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    let root = &image.trees[0];
    for lower in &root.lower {
        fsconfig_set_string(&context, "lowerdir+", lower).unwrap();
    }
    if let Some((upper, work)) = writable {
        fsconfig_set_string(&context, "upperdir", upper).unwrap();
        fsconfig_set_string(&context, "workdir", work).unwrap();
    } else {
        // A single lower directory alone is no overlay.
        if root.lower.len() == 1 {
            let empty = root.lower[0].parent().unwrap();
            fsconfig_set_string(&context, "lowerdir+", empty).unwrap();
        }
        fsconfig_set_flag(&context, "ro").unwrap();
    }
    fsconfig_set_string(&context, "redirect_dir", "on").unwrap();
    fsconfig_create(&context).unwrap();
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap()
}

fn inside(mount: &std::os::fd::OwnedFd, path: &str) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/self/fd/{}/{path}", mount.as_raw_fd()))
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_host_image_shows_no_secret() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    let host = match store.resolve("host") {
        Ok(host) => host,
        Err(error) if error.code == "host_image_unsupported" => return,
        Err(error) => panic!("{error}"),
    };
    assert!(host.id.starts_with("host:"));
    let targets: Vec<&Path> = host.trees.iter().map(|tree| tree.target.as_path()).collect();
    assert_eq!(targets, [Path::new("/"), Path::new("/usr")]);
    let root = &host.trees[0].lower[0];
    for secret in
        ["etc/ssh", "etc/sudoers", "etc/machine-id", "etc/gshadow", "etc/ssl/private", "etc/gitconfig", "etc/hostname"]
    {
        assert!(!root.join(secret).exists(), "{secret}");
    }
    assert!(!fs::read_to_string(root.join("etc/shadow")).unwrap().contains('$'));
    assert_eq!(fs::metadata(root.join("root")).unwrap().mode() & 0o7777, 0o700);
    assert_eq!(fs::metadata(root.join("tmp")).unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(fs::metadata(root.join("home/user")).unwrap().uid(), 1000);
    assert_eq!(names(&root.join("home")), ["user"]);
    assert!(names(&root.join("proc")).is_empty() && names(&root.join("usr")).is_empty());
    let again = place.open().resolve("host").unwrap();
    assert_eq!(
        (again.id.as_str(), fs::read_dir(place.dir.path().join("images/host")).unwrap().count()),
        (&*host.id, 1)
    );
    assert_eq!(store.remove("host").unwrap_err().code, "invalid_argument");
}

#[test]
fn images_survive_a_restart_and_half_done_work_does_not() {
    let Some(place) = Place::new() else { return };
    let path = place.tar("a.tar", Archive::default().file("f", "1"));
    let store = place.open();
    let info = store.import(&path, Some("a"), Format::Auto).unwrap();
    assert_eq!(store.import(&path, Some("b:latest"), Format::Tar).unwrap().id, info.id);
    drop(store);
    let images = place.dir.path().join("images");
    fs::create_dir_all(images.join("staging/left/fs")).unwrap();
    fs::create_dir_all(images.join("layers").join("0".repeat(64)).join("fs")).unwrap();
    let store = place.open();
    assert_eq!(names(&images.join("staging")).iter().filter(|name| *name == "left").count(), 0);
    assert_eq!(place.layers(), 2);
    store.sweep().unwrap();
    assert_eq!(place.layers(), 1, "a layer of no image goes");
    for name in ["a", "b", "b:latest", &info.id, &info.id[7..27]] {
        assert_eq!(store.resolve(name).unwrap().id, info.id, "{name}");
    }
    assert_eq!(store.inspect("a").unwrap().names, ["a", "b:latest"]);
    assert_eq!(store.resolve("c").unwrap_err().code, "image_not_found");
    assert_eq!(store.resolve("../../etc").unwrap_err().code, "image_not_found");
}

#[test]
fn an_image_in_use_stays() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    for name in ["a", "b"] {
        let archive = Archive::default().file(name, "");
        store.import(&place.tar(name, archive), Some(name), Format::Auto).unwrap();
    }
    let held = store.resolve("a").unwrap();
    assert_eq!(store.inspect("a").unwrap().in_use, 1);
    assert_eq!(store.remove("a").unwrap_err().code, "image_in_use");
    // Its name moves on: the image stays, without a name, as long as it is held.
    store.import(&place.dir.path().join("b"), Some("a"), Format::Auto).unwrap();
    store.sweep().unwrap();
    assert!(held.trees[0].lower[0].join("a").exists());
    assert_eq!(store.inspect(&held.id).unwrap().names, Vec::<String>::new());
    drop(held);
    store.sweep().unwrap();
    assert_eq!(place.layers(), 1);
    store.remove("a").unwrap();
    assert_eq!(store.resolve("a").unwrap_err().code, "image_not_found");
    assert_eq!(place.layers(), 1, "the other name still has it");
    store.remove("b").unwrap();
    assert_eq!(place.layers(), 0);
}

#[test]
fn one_layer_is_made_once() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    let mut archive = Archive::default();
    for index in 0..300 {
        archive = archive.file(&format!("f{index}"), "x");
    }
    let path = place.tar("a.tar", archive);
    std::thread::scope(|scope| {
        for name in ["a", "b", "c", "d"] {
            let (store, path) = (&store, &path);
            scope.spawn(move || store.import(path, Some(name), Format::Auto).unwrap());
        }
    });
    assert_eq!(place.layers(), 1);
    assert_eq!(store.inspect("a").unwrap().names, ["a", "b", "c", "d"]);
}

#[test]
fn a_sandbox_s_changes_become_a_layer() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    store
        .import(&place.tar("a.tar", Archive::default().file("old", "1").file("etc/x", "1")), Some("a"), Format::Auto)
        .unwrap();
    let base = store.resolve("a").unwrap();
    let upper = place.upper("upper");
    fs::create_dir(upper.join("etc")).unwrap();
    chown(upper.join("etc"), Some(BASE), Some(BASE)).unwrap();
    place.put(&upper.join("new"), "2", 1000);
    place.put(&upper.join("etc/hosts"), "of the sandbox", 0);
    place.put(&upper.join("etc/y"), "", 0);
    rustix::fs::mknodat(CWD, upper.join("old"), rustix::fs::FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    rustix::fs::lsetxattr(upper.join("new"), "security.capability", &capability, XattrFlags::empty()).unwrap();
    let options = CommitOptions {
        name: Some("b".into()),
        config: ConfigChange {
            workdir: Some("/w".into()),
            cmd: Some(vec!["run".into()]),
            labels: [("k".to_owned(), "v".to_owned())].into(),
            ..ConfigChange::default()
        },
    };
    let info = store.commit(&base, &[("/".into(), upper.clone())], BASE, options).unwrap();
    assert_eq!((info.config.cmd.as_slice(), info.config.labels["k"].as_str()), (["run".to_owned()].as_slice(), "v"));
    assert_eq!((info.names, info.layers.len(), info.config.workdir.as_deref()), (vec!["b".to_owned()], 2, Some("/w")));
    assert!(!upper.exists(), "moved, not copied");
    drop(base);
    store.remove("a").unwrap();
    assert_eq!(place.layers(), 2, "the base's layers live on in the new image");

    let image = store.resolve("b").unwrap();
    let mount = overlay(&image, None);
    assert_eq!(names(&inside(&mount, "")), ["etc", "new"]);
    assert_eq!(names(&inside(&mount, "etc")), ["x", "y"]);
    assert_eq!(fs::metadata(inside(&mount, "new")).unwrap().uid(), 1000);
    let mut value = [0; 64];
    let len = rustix::fs::getxattr(
        CString::new(inside(&mount, "new").to_str().unwrap()).unwrap(),
        "security.capability",
        &mut value,
    );
    assert_eq!(&value[..len.unwrap()], capability);
}

#[test]
fn commits_without_a_name_or_without_changes() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    store.import(&place.tar("a.tar", Archive::default().file("f", "1")), Some("a"), Format::Auto).unwrap();
    let base = store.resolve("a").unwrap();
    let unchanged = store.commit(&base, &[("/".into(), place.upper("u1"))], BASE, CommitOptions::default()).unwrap();
    assert_eq!(unchanged.id, base.id, "nothing changed: it is the base");
    let upper = place.upper("u2");
    place.put(&upper.join("g"), "", 0);
    let ephemeral = store.commit(&base, &[("/".into(), upper)], BASE, CommitOptions::default()).unwrap();
    assert_eq!(ephemeral.names, Vec::<String>::new());
    assert!(store.resolve(&ephemeral.id).is_ok());
    store.remove(&ephemeral.id).unwrap();
    assert_eq!(place.layers(), 1);

    let upper = place.upper("u3");
    place.put(&upper.join("g"), "", 65536);
    let error = store.commit(&base, &[("/".into(), upper)], BASE, CommitOptions::default()).unwrap_err();
    assert_eq!(error.code, "commit_failed");
    let error = store.commit(&base, &[("/usr".into(), place.upper("u4"))], BASE, CommitOptions::default()).unwrap_err();
    assert_eq!(error.code, "commit_failed");
    assert_eq!((place.layers(), names(&place.dir.path().join("images/staging")).len()), (1, 0));
}

/// Links and directories that change their kind between layers, opaque markers among them, as real overlayfs shows them.
#[test]
fn a_layer_that_turns_links_into_directories_and_back() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    let below = Archive::default()
        .file("t/keep", "")
        .symlink("l", "t")
        .file("d/old", "")
        .file("bin/x", "x")
        .symlink("bin/e", "x")
        .file("r/in", "");
    let above = Archive::default()
        .dir("l")
        .file("l/.wh..wh..opq", "")
        .file("l/new", "")
        .dir("d")
        .file("d/.wh..wh..opq", "")
        .file("d/new", "")
        .file("bin/e", "real")
        .symlink("r", "../run");
    // Two imports and a manifest by hand: the formats' own tests stack layers.
    let digests: Vec<LayerRef> = [("below", below), ("above", above)]
        .map(|(name, archive)| {
            let info = store.import(&place.tar(name, archive), Some(name), Format::Tar).unwrap();
            LayerRef::Stored(info.layers[0].clone())
        })
        .to_vec();
    let trees = vec![TreeRecord { target: "/".into(), layers: digests }];
    let info =
        store.record(Manifest::new(Origin::default(), trees, ImageConfig::default(), 0, vec![]), Some("both")).unwrap();
    let image = store.resolve(&info.id).unwrap();
    let (upper, work) = (place.dir.path().join("up"), place.dir.path().join("work"));
    fs::create_dir(&upper).unwrap();
    fs::create_dir(&work).unwrap();
    let mount = overlay(&image, Some((&upper, &work)));
    let at = |path: &str| inside(&mount, path);
    assert_eq!(names(&at("")), ["bin", "d", "l", "r", "t"]);
    assert_eq!([names(&at("t")), names(&at("l")), names(&at("d"))], [["keep"], ["new"], ["new"]]);
    assert_eq!(fs::read_to_string(at("bin/e")).unwrap(), "real");
    assert_eq!(fs::read_to_string(at("bin/x")).unwrap(), "x");
    assert_eq!(fs::read_link(at("r")).unwrap(), Path::new("../run"));
    fs::rename(at("t"), at("t2")).unwrap();
    assert_eq!(names(&at("t2")), ["keep"]);
    drop(mount);
    // And the renamed directory is still whole in an image made of it.
    let info = store.commit(&image, &[("/".into(), upper)], BASE, CommitOptions::default()).unwrap();
    let mount = overlay(&store.resolve(&info.id).unwrap(), None);
    assert_eq!(names(&inside(&mount, "")), ["bin", "d", "l", "r", "t2"]);
    assert_eq!(names(&inside(&mount, "t2")), ["keep"]);
}

/// Nodes, a FIFO, a set-uid program and a file capability in a layer.
#[test]
fn a_layer_with_nodes_and_privileges() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    let path = place.tar("a.tar", Archive::default().special_members());
    let info = store.import(&path, Some("a"), Format::Auto).unwrap();
    assert_eq!(info.warnings.len(), 2, "{:?}", info.warnings);
    let image = store.resolve("a").unwrap();
    let root = &image.trees[0].lower[0];
    assert!(!root.join("dev/null").exists() && !root.join("dev/sda").exists());
    assert!(fs::symlink_metadata(root.join("p")).unwrap().file_type().is_fifo());
    assert_eq!(fs::metadata(root.join("s")).unwrap().mode() & 0o7777, 0o4755);
}

#[test]
fn many_layers() {
    let Some(place) = Place::new() else { return };
    let store = place.open();
    store.import(&place.tar("a.tar", Archive::default().file("f", "0")), Some("a"), Format::Auto).unwrap();
    let mut image = store.resolve("a").unwrap();
    for index in 0..130 {
        let upper = place.upper("upper");
        place.put(&upper.join(format!("f{index}")), "", 0);
        let info = store.commit(&image, &[("/".into(), upper)], BASE, CommitOptions::default()).unwrap();
        image = store.resolve(&info.id).unwrap();
    }
    assert_eq!(image.trees[0].lower.len(), 131);
    assert_eq!(names(&inside(&overlay(&image, None), "")).len(), 131);
}
