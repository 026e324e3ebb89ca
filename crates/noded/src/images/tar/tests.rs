//! The reader against archives of an independent writer, of GNU tar's formats by hand, and against hostile ones.

use std::io::Cursor;

use super::*;

fn header(path: &str, flag: u8, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block[..path.len()].copy_from_slice(path.as_bytes());
    block[100..107].copy_from_slice(b"0000644");
    block[108..115].copy_from_slice(b"0000000");
    block[116..123].copy_from_slice(b"0000000");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000001");
    block[156] = flag;
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    block
}

fn seal(block: &mut [u8; BLOCK]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}

fn padded(data: &[u8]) -> Vec<u8> {
    let mut out = data.to_vec();
    out.resize(data.len().next_multiple_of(BLOCK), 0);
    out
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        let body = key.len() + value.len() + 3;
        let mut length = body + 1;
        while length != body + length.to_string().len() {
            length = body + length.to_string().len();
        }
        data.extend(format!("{length} {key}=").bytes());
        data.extend(*value);
        data.push(b'\n');
    }
    [header("pax", b'x', data.len() as u64).to_vec(), padded(&data)].concat()
}

fn all(archive: Vec<u8>) -> Result<Vec<(Entry, Vec<u8>)>, TarError> {
    let mut tar = Tar::new(Cursor::new(archive));
    let mut found = Vec::new();
    while let Some(entry) = tar.next()? {
        let mut data = Vec::new();
        let mut buf = [0; 100];
        loop {
            match tar.read_data(&mut buf)? {
                0 => break,
                got => data.extend(&buf[..got]),
            }
        }
        found.push((entry, data));
    }
    Ok(found)
}

fn refusal(archive: Vec<u8>) -> String {
    match all(archive) {
        Err(TarError::Bad { what, .. }) => what,
        other => panic!("{other:?}"),
    }
}

#[test]
fn reads_what_the_tar_crate_writes() {
    let mut builder = ::tar::Builder::new(Vec::new());
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(180));
    for (path, data) in [("a", &b"hello"[..]), (&long, &[7; 1000])] {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o4755);
        header.set_uid(65535);
        header.set_gid(1 << 40);
        header.set_mtime(1_700_000_000);
        builder.append_data(&mut header, path, data).unwrap();
    }
    let found = all(builder.into_inner().unwrap()).unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].0.path.as_slice(), found[0].1.as_slice()), (&b"a"[..], &b"hello"[..]));
    assert_eq!((found[0].0.mode, found[0].0.uid, found[0].0.gid), (0o4755, 65535, 1 << 40));
    assert_eq!((found[1].0.path.as_slice(), found[1].1.len()), (long.as_bytes(), 1000));
}

#[test]
fn pax_records_override_and_keep_binary_values() {
    let capability = b"\x01\x00\n\x02=\n\x00";
    let archive = [
        pax(&[("path", b"real/name"), ("mtime", b"-1.25"), ("SCHILY.xattr.security.capability", capability)]),
        header("short", b'0', 3).to_vec(),
        padded(b"abc"),
        vec![0; 1024],
    ];
    let found = all(archive.concat()).unwrap();
    assert_eq!(found[0].0.path, b"real/name");
    assert_eq!(found[0].0.mtime, (-2, 750_000_000));
    assert_eq!(found[0].0.xattrs, [(b"security.capability".to_vec(), capability.to_vec())]);
    assert_eq!(found[0].1, b"abc");
}

#[test]
fn sparse_files_of_pax_1_0() {
    let map = padded(b"2\n0\n3\n1000\n2\n");
    let data = [map, b"abcde".to_vec()].concat();
    let archive = [
        pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"s"),
            ("GNU.sparse.realsize", b"2000"),
        ]),
        header("GNUSparseFile.0/s", b'0', data.len() as u64).to_vec(),
        padded(&data),
        header("next", b'0', 0).to_vec(),
    ];
    let found = all(archive.concat()).unwrap();
    assert_eq!(found[0].0.path, b"s");
    assert_eq!(found[0].0.size, 2000);
    assert_eq!(found[0].0.segments, Some(vec![Segment { offset: 0, len: 3 }, Segment { offset: 1000, len: 2 }]));
    assert_eq!(found[0].1, b"abcde");
    assert_eq!(found[1].0.path, b"next");
}

#[test]
fn sparse_maps_that_lie_are_refused() {
    for map in ["0,3,1,2", "0,6", "3000,5", "18446744073709551615,5"] {
        let archive = [
            pax(&[("GNU.sparse.size", b"2000"), ("GNU.sparse.map", map.as_bytes())]),
            header("s", b'0', 5).to_vec(),
            padded(b"abcde"),
        ];
        assert!(refusal(archive.concat()).contains("sparse"), "{map}");
    }
}

#[test]
fn hostile_lengths_cost_no_memory() {
    assert!(refusal(header("x", b'L', 1 << 32).to_vec()).contains("long name"));
    assert!(refusal(header("x", b'x', 1 << 32).to_vec()).contains("PAX"));
    let record = padded(b"99999999999999999999 a=b\n");
    assert!(refusal([header("x", b'x', 25).to_vec(), record].concat()).contains("PAX"));
}

#[test]
fn truncation_and_noise_are_told() {
    assert!(refusal(header("a", b'0', 600)[..300].to_vec()).contains("within a header"));
    assert!(refusal([header("a", b'0', 600).to_vec(), vec![1; 512]].concat()).contains("within a file"));
    assert!(refusal(vec![b'x'; 512]).contains("checksum"));
    let mut tar = Tar::new(Cursor::new(header("a", b'0', 0).to_vec()));
    while tar.next().unwrap().is_some() {}
    assert!(!tar.saw_end());
}

#[test]
fn numbers() {
    assert_eq!(header::number(b"0000644\0"), Some(0o644));
    assert_eq!(header::number(b"   644 \0"), Some(0o644));
    assert_eq!(header::number(b"\0\0\0\0"), Some(0));
    assert_eq!(header::number(b"\x80\0\0\x01\0"), Some(256));
    assert_eq!(header::number(b"\xff\xff\xff\xff"), Some(-1));
    assert_eq!(header::number(b"9"), None);
    assert_eq!(header::number(b"-7"), None);
}
