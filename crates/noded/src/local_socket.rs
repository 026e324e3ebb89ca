//! Unix sockets in directories whose path is longer than an address can hold, and descriptors that go with a message.

use std::{
    fs,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixListener},
    },
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags},
    net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
};
use tokio::{
    io::{AsyncWriteExt as _, Interest},
    net::UnixStream,
};

/// Longest path of a unix socket's address.
const SUN_PATH: usize = 107;

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Binds a listening socket `name` in `dir`, which only its owner may connect to.
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let dir = open_directory(dir)?;
    let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects, once: `WouldBlock` when the accept queue is full.
pub async fn connect(socket: &Path) -> io::Result<UnixStream> {
    if socket.as_os_str().len() <= SUN_PATH {
        return UnixStream::connect(socket).await;
    }
    let (Some(parent), Some(name)) = (socket.parent(), socket.file_name()) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let directory = open_directory(parent)?;
    let mut short = format!("/proc/self/fd/{}/", directory.as_raw_fd());
    short.push_str(&name.to_string_lossy());
    UnixStream::connect(short).await
}

/// Sends a message whose first byte carries the descriptor.
pub async fn send_with(mut stream: UnixStream, message: &[u8], descriptor: &impl AsFd) -> io::Result<()> {
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let descriptors = [descriptor.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            Ok(sendmsg(&stream, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?)
        })
        .await?;
    stream.write_all(&message[sent..]).await
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn a_long_path_can_be_listened_on_and_reached() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("x".repeat(120));
        fs::create_dir_all(&path).unwrap();
        let listener = bind(&path, "s.sock").unwrap();
        let socket = path.join("s.sock");
        assert!(socket.exists());
        send_with(connect(&socket).await.unwrap(), b"hello", &listener).await.unwrap();
        listener.set_nonblocking(true).unwrap();
        let (mut accepted, _) = tokio::net::UnixListener::from_std(listener).unwrap().accept().await.unwrap();
        let mut said = String::new();
        accepted.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "hello");
    }
}
