use std::{
    ffi::OsStr,
    io::Cursor,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{symlink, MetadataExt as _, PermissionsExt as _},
    },
    path::Path,
    sync::Arc,
};

use sandmill_wire::ApiError;
use tar::{Builder, EntryType, Header};

use super::{
    super::{entry::open_directory, place::Owner, scratch::Scratch},
    open,
    pack::pack,
    unpack::{unpack, Owners, Unpacked},
};

const USER: Owner = Owner { uid: 1000, gid: 1000 };

fn packed(path: &Path) -> Vec<u8> {
    pack(&open(path).unwrap(), Arc::default(), Vec::new()).unwrap()
}

fn unpacked(archive: Vec<u8>, path: &Path, owners: Owners) -> Result<Unpacked, ApiError> {
    let root = open_directory(rustix::fs::CWD, path, true).unwrap();
    unpack(Cursor::new(archive), root, path, USER, owners)
}

/// One line for each entry: type, mode, size, name, target.
fn shape(path: &Path) -> Vec<String> {
    fn walk(top: &Path, path: &Path, lines: &mut Vec<String>) {
        let mut entries: Vec<_> = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for entry in entries {
            let metadata = entry.symlink_metadata().unwrap();
            let target = std::fs::read_link(&entry).ok();
            let name = entry.strip_prefix(top).unwrap();
            let size = if metadata.is_file() { metadata.len() } else { 0 };
            lines.push(format!("{:o} {size} {name:?} {target:?} {}", metadata.mode(), metadata.mtime()));
            if metadata.is_dir() {
                walk(top, &entry, lines);
            }
        }
    }
    let mut lines = Vec::new();
    walk(path, path, &mut lines);
    lines
}

#[test]
fn a_tree_comes_back_as_it_was() {
    let scratch = Scratch::new();
    let tree = scratch.path("tree");
    let long = "n".repeat(200);
    std::fs::create_dir_all(tree.join("d/sub")).unwrap();
    std::fs::write(tree.join("s.sh"), "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(tree.join("s.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(tree.join("d").join(&long), vec![7; 300_000]).unwrap();
    std::fs::write(tree.join(OsStr::from_bytes(b"x\ny\xff ")), "odd").unwrap();
    std::fs::hard_link(tree.join("s.sh"), tree.join("t.sh")).unwrap();
    symlink("d", tree.join("dirlink")).unwrap();
    symlink("self", tree.join("self")).unwrap();
    symlink("/nowhere/at/all", tree.join("dangling")).unwrap();
    symlink(&long, tree.join("d/longlink")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, tree.join("p"), rustix::fs::Mode::from_raw_mode(0o640)).unwrap();
    std::fs::set_permissions(tree.join("d/sub"), std::fs::Permissions::from_mode(0o3750)).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("sock")).unwrap();
    std::fs::create_dir(scratch.path("back")).unwrap();
    let back = scratch.path("back");
    let done = unpacked(packed(&tree), &back, Owners::Caller).unwrap();
    std::fs::remove_file(tree.join("sock")).unwrap();
    assert!(done.warnings.is_empty(), "{:?}", done.warnings);
    let without_times = |lines: Vec<String>| lines; // times of files and directories come back too
    let (mut before, mut after) = (without_times(shape(&tree)), without_times(shape(&back)));
    // Links' times are set as well, but the tree's own top isn't listed.
    before.sort();
    after.sort();
    assert_eq!(after, before);
    let inode = |name: &str| back.join(name).metadata().unwrap().ino();
    assert_eq!(inode("s.sh"), inode("t.sh"));
    assert_eq!(back.join("d/sub").metadata().unwrap().uid(), USER.uid);
}

#[test]
fn owners_are_kept_when_asked() {
    let scratch = Scratch::new();
    let tree = scratch.path("tree");
    std::fs::create_dir_all(&tree).unwrap();
    std::fs::create_dir_all(scratch.path("back")).unwrap();
    std::fs::write(tree.join("f"), "").unwrap();
    std::os::unix::fs::chown(tree.join("f"), Some(7), Some(8)).unwrap();
    unpacked(packed(&tree), &scratch.path("back"), Owners::Kept).unwrap();
    let metadata = scratch.path("back/f").metadata().unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (7, 8));
}

#[test]
fn a_single_file_and_the_contents_of_the_kernels_directories() {
    let scratch = Scratch::new();
    std::fs::write(scratch.path("f"), "x").unwrap();
    std::fs::create_dir(scratch.path("back")).unwrap();
    unpacked(packed(&scratch.path("f")), &scratch.path("back"), Owners::Caller).unwrap();
    assert_eq!(std::fs::read(scratch.path("back/f")).unwrap(), b"x");
    assert_eq!(open(Path::new("/dev/null")).err().unwrap().code, "not_a_regular_file");
    assert_eq!(open(&scratch.path("none")).err().unwrap().code, "not_found");
}

fn archive(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, name, link_or_data) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        let data = if *kind == EntryType::Regular { link_or_data.as_bytes() } else { b"" };
        header.set_size(data.len() as u64);
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        if data.is_empty() {
            old.linkname[..link_or_data.len()].copy_from_slice(link_or_data.as_bytes());
        }
        header.set_cksum();
        builder.append(&header, data).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn hostile_archives_stay_inside() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("in")).unwrap();
    std::fs::create_dir(scratch.path("out")).unwrap();
    let (target, out) = (scratch.path("in"), scratch.path("out"));
    let out_text = out.to_str().unwrap();
    let code =
        |entries: &[(EntryType, &str, &str)]| unpacked(archive(entries), &target, Owners::Caller).map_err(|e| e.code);
    let refused = |entries: &[(EntryType, &str, &str)]| assert_eq!(code(entries).unwrap_err(), "unsafe_archive");
    refused(&[(EntryType::Regular, "../out/a", "x")]);
    refused(&[(EntryType::Regular, "d/../../out/a", "x")]);
    refused(&[(EntryType::Symlink, "l", out_text), (EntryType::Regular, "l/a", "x")]);
    refused(&[
        (EntryType::Symlink, "l2", "../out"),
        (EntryType::Directory, "l2/", ""),
        (EntryType::Regular, "l2/a", "x"),
    ]);
    refused(&[(EntryType::Symlink, "l3", out_text), (EntryType::Link, "h", "l3/a")]);
    refused(&[(EntryType::Link, "h2", "../out/x")]);
    code(&[(EntryType::Regular, "/abs/f", "x")]).unwrap();
    assert_eq!(std::fs::read(scratch.path("in/abs/f")).unwrap(), b"x");
    // A link in the place of a file is replaced, not followed.
    std::fs::write(out.join("victim"), "safe").unwrap();
    let victim = out.join("victim");
    code(&[(EntryType::Symlink, "f", victim.to_str().unwrap()), (EntryType::Regular, "f", "new")]).unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"safe");
    assert_eq!(std::fs::read(scratch.path("in/f")).unwrap(), b"new");
    // A link that was there before leads as if the target were the root: here, to nowhere.
    symlink(&out, scratch.path("in/old")).unwrap();
    assert_eq!(code(&[(EntryType::Regular, "old/a", "x")]).unwrap_err(), "not_found");
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1);
    assert_eq!(
        std::fs::read_dir(&target)
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().as_bytes().starts_with(b".sandmill"))
            .count(),
        0
    );
}

#[test]
fn devices_are_skipped_and_said() {
    let scratch = Scratch::new();
    let done = unpacked(
        archive(&[
            (EntryType::Char, "dev/null", ""),
            (EntryType::Block, "dev/sda", ""),
            (EntryType::Regular, "f", "x"),
        ]),
        &scratch.path(""),
        Owners::Caller,
    )
    .unwrap();
    assert_eq!((done.entries, done.bytes, done.warnings.len()), (3, 1, 2));
    assert!(scratch.path("f").exists() && !scratch.path("dev/null").exists());
    assert_eq!(unpacked(vec![7; 1024], &scratch.path(""), Owners::Caller).unwrap_err().code, "invalid_archive");
}
