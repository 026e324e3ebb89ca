//! Layers as they come, and as attackers make them. Owners, nodes and `trusted.*` need root: without it these tests say
//! so and pass.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Cursor,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use proptest::prelude::*;

use super::*;

const NO_LIMITS: Limits = Limits { entries: u64::MAX, bytes: u64::MAX };

/// Builds archives member by member; names are taken as they are.
#[derive(Default)]
pub struct Archive(Vec<u8>);

impl Archive {
    fn member(mut self, path: &str, kind: ::tar::EntryType, link: &str, data: &[u8], owner: u64, mode: u32) -> Self {
        let mut header = ::tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_size(data.len() as u64);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_mode(mode);
        header.set_mtime(1_600_000_000);
        header.set_cksum();
        self.0.extend(header.as_bytes());
        self.0.extend(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, path: &str, data: &str) -> Self {
        self.member(path, ::tar::EntryType::Regular, "", data.as_bytes(), 0, 0o644)
    }

    pub fn dir(self, path: &str) -> Self {
        self.member(path, ::tar::EntryType::Directory, "", b"", 0, 0o755)
    }

    pub fn symlink(self, path: &str, target: &str) -> Self {
        self.member(path, ::tar::EntryType::Symlink, target, b"", 0, 0o777)
    }

    fn hard_link(self, path: &str, target: &str) -> Self {
        self.member(path, ::tar::EntryType::Link, target, b"", 0, 0o644)
    }

    fn of(self, path: &str, kind: ::tar::EntryType) -> Self {
        self.member(path, kind, "", b"", 0, 0o644)
    }

    pub fn sticky_dir(self, path: &str) -> Self {
        self.member(path, ::tar::EntryType::Directory, "", b"", 0, 0o1777)
    }

    /// Two device nodes, a FIFO and a set-uid program.
    pub fn special_members(self) -> Self {
        self.of("dev/null", ::tar::EntryType::Char)
            .of("dev/sda", ::tar::EntryType::Block)
            .of("p", ::tar::EntryType::Fifo)
            .member("s", ::tar::EntryType::Regular, "", b"#!", 0, 0o4755)
    }

    pub fn bytes(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    /// Unpacks into `layer` within a directory of its own.
    fn unpack(self) -> (tempfile::TempDir, Result<Unpacked>) {
        let place = tempfile::tempdir().unwrap();
        let result = unpack("t.tar", &mut Tar::new(Cursor::new(self.bytes())), &place.path().join("layer"), NO_LIMITS);
        (place, result)
    }

    fn unpacked(self) -> (tempfile::TempDir, PathBuf, Unpacked) {
        let (place, result) = self.unpack();
        let root = place.path().join("layer");
        (place, root, result.unwrap())
    }

    fn refused(self) -> String {
        let (place, result) = self.unpack();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "nothing but the layer was made");
        match result {
            Err(error @ Error::Malformed { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }
}

macro_rules! needs_root {
    () => {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
    };
}

fn is_opaque(path: &Path) -> bool {
    let mut value = [0; 8];
    rustix::fs::lgetxattr(path, "trusted.overlay.opaque", &mut value) == Ok(1) && value[0] == b'y'
}

fn is_whiteout(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device() && metadata.rdev() == 0)
}

#[test]
fn files_keep_owner_mode_and_time() {
    needs_root!();
    let archive = Archive::default()
        .member("d/", ::tar::EntryType::Directory, "", b"", 7, 0o1777)
        .member("d/s", ::tar::EntryType::Regular, "", b"x", 65535, 0o6755)
        .of("d/p", ::tar::EntryType::Fifo)
        .symlink("d/l", "/etc/passwd");
    let (_place, root, unpacked) = archive.unpacked();
    let file = fs::metadata(root.join("d/s")).unwrap();
    assert_eq!((file.uid(), file.mode() & 0o7777, file.mtime()), (65535, 0o6755, 1_600_000_000));
    let dir = fs::metadata(root.join("d")).unwrap();
    assert_eq!((dir.uid(), dir.mode() & 0o7777, dir.mtime()), (7, 0o1777, 1_600_000_000));
    assert!(fs::symlink_metadata(root.join("d/p")).unwrap().file_type().is_fifo());
    assert_eq!(fs::read_link(root.join("d/l")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!((unpacked.entries, unpacked.size_bytes, unpacked.complete), (4, 1, true));
}

#[test]
fn owners_outside_of_the_range_are_refused() {
    let archive = Archive::default().member("x", ::tar::EntryType::Regular, "", b"", 65536, 0o644);
    assert!(archive.refused().contains("65536"));
}

#[test]
fn paths_never_leave_the_root() {
    assert!(Archive::default().file("../x", "").refused().contains("out of the root"));
    assert!(Archive::default().file("a/../../x", "").refused().contains("out of the root"));
    assert!(Archive::default().hard_link("x", "../../etc/passwd").refused().contains("out of the root"));
    needs_root!();
    let (_place, root, _) = Archive::default().file("/abs", "1").file("a/./b/../c", "2").unpacked();
    assert_eq!(fs::read_to_string(root.join("abs")).unwrap(), "1");
    assert_eq!(fs::read_to_string(root.join("a/c")).unwrap(), "2");
}

#[test]
fn links_are_followed_within_the_root_only() {
    needs_root!();
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    // Absolute, climbing and chained links mean what they mean to a process whose root the layer is.
    for link in [target.to_owned(), format!("../../../../../..{target}"), "hop".to_owned()] {
        let archive = Archive::default().symlink("hop", target).symlink("l", &link).file("l/x", "in");
        let (_place, root, _) = archive.unpacked();
        assert_eq!(fs::read_to_string(root.join(target.trim_start_matches('/')).join("x")).unwrap(), "in", "{link}");
    }
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    assert!(Archive::default().symlink("a", "b").symlink("b", "a").file("a/x", "").refused().contains("loop"));
}

#[test]
fn a_member_replaces_a_link_and_never_writes_through_it() {
    needs_root!();
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "old").unwrap();
    let archive = Archive::default().symlink("x", victim.to_str().unwrap()).file("x", "new");
    let (_place, root, _) = archive.unpacked();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "old");
    assert!(fs::symlink_metadata(root.join("x")).unwrap().is_file());
    let archive = Archive::default().symlink("x", victim.to_str().unwrap()).hard_link("y", "x").file("y", "new");
    let (_place, root, _) = archive.unpacked();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "old");
    assert_eq!(fs::read_to_string(root.join("y")).unwrap(), "new");
}

#[test]
fn hard_links() {
    needs_root!();
    let (_place, root, _) = Archive::default().file("a/x", "1").hard_link("y", "/a/x").hard_link("a/x", "y").unpacked();
    let (x, y) = (fs::metadata(root.join("a/x")).unwrap(), fs::metadata(root.join("y")).unwrap());
    assert_eq!((x.ino(), x.nlink()), (y.ino(), 2));
    assert!(Archive::default().hard_link("y", "nowhere").refused().contains("not in this layer"));
    assert!(Archive::default().dir("d").hard_link("y", "d").refused().contains("directory"));
    assert!(Archive::default().hard_link("y", "/").refused().contains("root"));
}

#[test]
fn device_nodes_are_left_out_with_a_warning() {
    needs_root!();
    let archive =
        Archive::default().of("dev/null", ::tar::EntryType::Char).of("dev/sda", ::tar::EntryType::Block).file("f", "");
    let (_place, root, unpacked) = archive.unpacked();
    assert!(!root.join("dev").exists());
    assert_eq!(unpacked.warnings.len(), 2);
    assert!(unpacked.warnings[0].contains("dev/null"));
}

#[test]
fn a_character_device_0_0_of_an_archive_is_no_whiteout() {
    needs_root!();
    let (_place, root, _) = Archive::default().of("etc", ::tar::EntryType::Char).unpacked();
    assert!(!is_whiteout(&root.join("etc")));
}

#[test]
fn whiteouts_in_any_order() {
    needs_root!();
    let (_place, root, _) = Archive::default().file("d/.wh.gone", "").unpacked();
    assert!(is_whiteout(&root.join("d/gone")));

    // Of a name that the layer itself has, only what is below is hidden.
    for archive in [
        Archive::default().file(".wh.x", "").dir("x").file("x/new", ""),
        Archive::default().dir("x").file("x/new", "").file(".wh.x", ""),
        Archive::default().file(".wh.x", "").file("x/new", ""),
    ] {
        let (_place, root, _) = archive.unpacked();
        assert!(is_opaque(&root.join("x")) && root.join("x/new").exists());
    }
    for archive in
        [Archive::default().file(".wh.x", "").file("x", "1"), Archive::default().file("x", "1").file(".wh.x", "")]
    {
        let (_place, root, _) = archive.unpacked();
        assert_eq!(fs::read_to_string(root.join("x")).unwrap(), "1");
    }
    for bad in [".wh.", ".wh..", ".wh..."] {
        assert!(Archive::default().file(bad, "").refused().contains("whiteout"), "{bad}");
    }
}

#[test]
fn opaque_markers_in_any_order() {
    needs_root!();
    for archive in [
        Archive::default().file("d/.wh..wh..opq", "").dir("d").file("d/new", "").file("d/s/.wh.old", ""),
        Archive::default().file("d/s/.wh.old", "").file("d/new", "").file("d/.wh..wh..opq", ""),
    ] {
        let (_place, root, unpacked) = archive.unpacked();
        assert!(is_opaque(&root.join("d")) && root.join("d/new").exists());
        assert!(fs::symlink_metadata(root.join("d/s/old")).is_err(), "a whiteout below hides nothing");
        assert!(!unpacked.opaque_root);
    }
    let (_place, root, unpacked) = Archive::default().file(".wh..wh..opq", "").file("x", "").unpacked();
    assert!(unpacked.opaque_root && root.join("x").exists());
}

#[test]
fn markers_are_not_applied_through_links() {
    needs_root!();
    let archive = Archive::default()
        .dir("t")
        .file("t/keep", "")
        .symlink("l", "t")
        .file("l/.wh..wh..opq", "")
        .file("l/.wh.keep", "");
    let (_place, root, _) = archive.unpacked();
    assert!(!is_opaque(&root.join("t")) && root.join("t/keep").is_file());
}

#[test]
fn later_members_replace_earlier_ones_of_any_kind() {
    needs_root!();
    let archive = Archive::default()
        .file("x/deep/f", "")
        .file("x", "file")
        .file("y", "")
        .dir("y")
        .file("y/in", "")
        .symlink("y/in", "z");
    let (_place, root, _) = archive.unpacked();
    assert_eq!(fs::read_to_string(root.join("x")).unwrap(), "file");
    assert_eq!(fs::read_link(root.join("y/in")).unwrap(), Path::new("z"));
    assert!(Archive::default().file("f", "").file("f/x", "").refused().contains("no directory"));
}

#[test]
fn limits_hold() {
    let archive = || Cursor::new(Archive::default().file("a", "12345").file("b", "12345").bytes());
    for (limits, what) in
        [(Limits { entries: 1, bytes: 99 }, "1 entries"), (Limits { entries: 9, bytes: 9 }, "9 bytes")]
    {
        let place = tempfile::tempdir().unwrap();
        let error = unpack("t", &mut Tar::new(archive()), &place.path().join("l"), limits).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }) && error.to_string().contains(what), "{error}");
    }
}

#[test]
fn trusted_attributes_of_an_archive_do_not_count() {
    for bad in
        ["trusted.overlay.redirect", "trusted.overlay.opaque", "user.overlay.opaque", "security.selinux", "trusted.x"]
    {
        assert!(!is_allowed_attribute(bad.as_bytes()), "{bad}");
    }
    assert!(is_allowed_attribute(b"security.capability") && is_allowed_attribute(b"user.note"));
}

/// What a stack of layers must look like, as the specification words it: markers first, then entries.
#[derive(Debug, Clone)]
enum Change {
    File(PathBuf, String),
    Dir(PathBuf),
    Remove(PathBuf),
    Opaque(PathBuf),
}

fn apply(union: &mut BTreeMap<PathBuf, Option<String>>, layer: &[Change]) {
    let hide = |union: &mut BTreeMap<PathBuf, Option<String>>, path: &Path, itself: bool| {
        union.retain(|at, _| !(at.starts_with(path) && (itself || at != path)));
    };
    for change in layer {
        match change {
            Change::Remove(path) => hide(union, path, true),
            Change::Opaque(path) => hide(union, path, false),
            Change::File(..) | Change::Dir(_) => {}
        }
    }
    for change in layer {
        let (path, content) = match change {
            Change::File(path, content) => (path, Some(content.clone())),
            Change::Dir(path) | Change::Opaque(path) => (path, None),
            Change::Remove(path) => {
                // The marker's directory is there, as every parent of a member.
                for parent in path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
                    union.insert(parent.to_owned(), None);
                }
                continue;
            }
        };
        for parent in path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            union.insert(parent.to_owned(), None);
        }
        if content.is_some() || union.get(path).is_some_and(Option::is_some) {
            hide(union, path, true);
        }
        union.insert(path.clone(), content);
    }
}

/// What overlayfs makes of unpacked layers, topmost first.
fn merged(layers: &[PathBuf], dir: &Path, out: &mut BTreeMap<PathBuf, Option<String>>) {
    let mut names = BTreeSet::new();
    for layer in layers {
        if let Ok(entries) = fs::read_dir(layer.join(dir)) {
            names.extend(entries.map(|entry| entry.unwrap().file_name()));
        }
    }
    for name in names {
        let path = dir.join(&name);
        let mut parts = Vec::new();
        for layer in layers {
            let at = layer.join(&path);
            match fs::symlink_metadata(&at) {
                Err(_) => continue,
                Ok(metadata) if metadata.is_dir() => {
                    parts.push(layer.clone());
                    if is_opaque(&at) {
                        break;
                    }
                }
                Ok(_) => {
                    if parts.is_empty() && !is_whiteout(&at) {
                        out.insert(path.clone(), Some(fs::read_to_string(&at).unwrap()));
                    }
                    break;
                }
            }
        }
        if !parts.is_empty() {
            out.insert(path.clone(), None);
            merged(&parts, &path, out);
        }
    }
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let path = prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|parts| parts.iter().collect::<PathBuf>());
    let change = (path, 0..5_u8, "[a-z]{0,3}").prop_map(|(path, kind, content)| match kind {
        0 | 1 => Change::File(path, content),
        2 => Change::Dir(path),
        3 => Change::Remove(path),
        _ => Change::Opaque(path),
    });
    // One layer says one thing about a path, and nothing below what it says is a file: as every writer of layers does.
    prop::collection::vec(change, 0..8).prop_map(|changes| {
        let mut said: Vec<Change> = Vec::new();
        for change in changes {
            let (path, is_file, is_gone) = match &change {
                Change::File(path, _) => (path, true, false),
                Change::Remove(path) => (path, false, true),
                Change::Dir(path) | Change::Opaque(path) => (path, false, false),
            };
            let clashes = said.iter().any(|other| match other {
                Change::File(at, _) => path.starts_with(at) || (is_file || is_gone) && at.starts_with(path),
                Change::Remove(at) => path == at || is_gone && at.starts_with(path) || path.starts_with(at) && is_gone,
                Change::Dir(at) | Change::Opaque(at) => (is_file || is_gone) && at.starts_with(path) || path == at,
            });
            if !clashes {
                said.push(change);
            }
        }
        said
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stacked_layers_equal_the_model(layers in prop::collection::vec(changes(), 1..4)) {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let place = tempfile::tempdir().unwrap();
        let mut model = BTreeMap::new();
        let mut roots = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            apply(&mut model, layer);
            let mut archive = Archive::default();
            for change in layer {
                archive = match change {
                    Change::File(path, content) => archive.file(path.to_str().unwrap(), content),
                    Change::Dir(path) => archive.dir(path.to_str().unwrap()),
                    Change::Opaque(path) => archive.file(path.join(".wh..wh..opq").to_str().unwrap(), ""),
                    Change::Remove(path) => {
                        let marker = format!(".wh.{}", path.file_name().unwrap().to_str().unwrap());
                        archive.file(path.with_file_name(marker).to_str().unwrap(), "")
                    }
                };
            }
            let root = place.path().join(index.to_string());
            unpack("layer", &mut Tar::new(Cursor::new(archive.bytes())), &root, NO_LIMITS).unwrap();
            roots.insert(0, root);
        }
        let mut found = BTreeMap::new();
        merged(&roots, Path::new(""), &mut found);
        prop_assert_eq!(found, model);
    }
}
