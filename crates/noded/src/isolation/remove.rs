//! Deletion of directory trees that a sandbox filled: deep, wide, with odd names and links; nothing outside is touched.

use std::{io, path::Path};

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{unlinkat, AtFlags, Dir, Mode, OFlags};

/// Removes `path` and everything below it, without following a link; missing is fine.
///
/// Iterative over directories (a sandbox may nest tens of thousands), holding one descriptor a level up to a bound: below
/// that, subdirectories are first moved up to the top, so that neither depth nor path length matters.
pub fn tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::other("refusing to remove a root"));
    };
    let parent = match rustix::fs::open(parent, directory(), Mode::empty()) {
        Ok(parent) => parent,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match unlinkat(&parent, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(_) => {}
    }
    let top = rustix::fs::openat(&parent, name, directory(), Mode::empty())?;
    let mut moved = 0_u64;
    empty(&top, &top, 0, &mut moved)?;
    drop(top);
    unlinkat(&parent, name, AtFlags::REMOVEDIR)?;
    Ok(())
}

const DEEPEST: usize = 64;

fn directory() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn empty(top: &OwnedFd, here: &OwnedFd, depth: usize, moved: &mut u64) -> io::Result<()> {
    loop {
        let mut again = false;
        // Names are collected a directory at a time: removing while reading may skip entries.
        let mut names = Vec::new();
        for entry in Dir::read_from(here.as_fd())? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_bytes() != b"." && name.to_bytes() != b".." {
                names.push((name.to_owned(), entry.file_type()));
            }
        }
        for (name, kind) in names {
            if kind != rustix::fs::FileType::Directory {
                match unlinkat(here, &name, AtFlags::empty()) {
                    Ok(()) | Err(rustix::io::Errno::NOENT) => continue,
                    Err(rustix::io::Errno::ISDIR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if unlinkat(here, &name, AtFlags::REMOVEDIR).is_ok() {
                continue;
            }
            if depth >= DEEPEST {
                *moved += 1;
                rustix::fs::renameat(here, &name, top, format!(".sandmill-removing-{moved}"))?;
                again = true;
                continue;
            }
            let child = rustix::fs::openat(here, &name, directory(), Mode::empty())?;
            empty(top, &child, depth + 1, moved)?;
            drop(child);
            unlinkat(here, &name, AtFlags::REMOVEDIR)?;
        }
        // What deeper levels moved up lands in the top directory.
        if depth > 0 || (!again && Dir::read_from(here.as_fd())?.filter_map(Result::ok).count() <= 2) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    #[test]
    fn deep_wide_and_odd() {
        let top = std::env::temp_dir().join(format!("sandmill-remove-{}", std::process::id()));
        fs::create_dir_all(&top).unwrap();
        let outside = top.with_extension("outside");
        fs::write(&outside, "stays").unwrap();
        let mut here = rustix::fs::open(&top, super::directory(), rustix::fs::Mode::empty()).unwrap();
        for _ in 0..700 {
            rustix::fs::mkdirat(&here, "deep", 0o700.into()).unwrap();
            here = rustix::fs::openat(&here, "deep", super::directory(), rustix::fs::Mode::empty()).unwrap();
        }
        for n in 0..500 {
            fs::write(top.join(format!("f{n}")), "x").unwrap();
        }
        std::os::unix::fs::symlink(&outside, top.join("link")).unwrap();
        std::os::unix::fs::symlink("/", top.join("slash")).unwrap();
        super::tree(&top).unwrap();
        assert!(!top.exists());
        assert_eq!(fs::read_to_string(&outside).unwrap(), "stays");
        fs::remove_file(outside).unwrap();
        super::tree(&top).unwrap();
    }
}
