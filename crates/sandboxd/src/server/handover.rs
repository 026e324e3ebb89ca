//! The first bytes of a connection on noded's socket: an ordinary HTTP request, a client's connection handed over, or the
//! tether to noded.
//!
//! A handover is one message: `0x01`, u32be length, that many bytes already read from the client, with the client's
//! descriptor in SCM_RIGHTS. Descriptors come with the first byte's message only, so the first read is a recvmsg.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    rc::Rc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use sandmill_wire::{LeaseTerms, HANDOVER, TETHER};
use tokio::{
    io::{AsyncReadExt as _, Interest},
    net::{TcpStream, UnixStream},
};

use super::{connection, connection::Prefixed, Origin};
use crate::app::App;

/// Longest beginning of a request that noded may have read before it hands the connection over.
const PREFIX_LIMIT_BYTES: usize = 1 << 20;
/// noded sends a handover in one go: more time means that it broke off.
const HANDOVER_DEADLINE: Duration = Duration::from_secs(5);

/// Serves one accepted unix connection.
pub async fn serve(app: Rc<App>, stream: UnixStream) {
    let Ok((first, descriptor)) = first_read(&stream).await else { return };
    if first.is_empty() {
        return;
    }
    if first[0] == TETHER {
        return tie(&app, &first, descriptor);
    }
    if first[0] != HANDOVER {
        return connection::serve(app, Prefixed::new(first, stream), Origin::Trusted).await;
    }
    let Some(descriptor) = descriptor else { return };
    let rest = tokio::time::timeout(HANDOVER_DEADLINE, read_prefix(stream, first)).await;
    let Ok(Ok(prefix)) = rest else { return };
    match adopt(descriptor) {
        Ok(Client::Tcp(client)) => connection::serve(app, Prefixed::new(prefix, client), Origin::Trusted).await,
        Ok(Client::Unix(client)) => connection::serve(app, Prefixed::new(prefix, client), Origin::Trusted).await,
        Err(error) => eprintln!("sandboxd: a connection handed over can't be used: {error}"),
    }
}

/// noded sends it in one message.
fn tie(app: &App, message: &[u8], descriptor: Option<OwnedFd>) {
    let terms = message.get(1).zip(message.get(2..10).and_then(|bytes| bytes.try_into().ok()));
    let (Some((by_use, lease)), Some(noded)) = (terms, descriptor) else {
        eprintln!("sandboxd: a tether without its terms or its descriptor is of no use");
        return;
    };
    let terms = LeaseTerms { ttl_s: f64::from_be_bytes(lease), renew_on_use: *by_use == 1 };
    if let Err(error) = app.tether.tie(noded, terms) {
        eprintln!("sandboxd: not tied to noded: {error}");
    }
}

enum Client {
    Tcp(TcpStream),
    Unix(UnixStream),
}

fn adopt(descriptor: OwnedFd) -> io::Result<Client> {
    rustix::io::ioctl_fionbio(&descriptor, true)?;
    if rustix::net::sockopt::socket_domain(&descriptor)? == rustix::net::AddressFamily::UNIX {
        return Ok(Client::Unix(UnixStream::from_std(descriptor.into())?));
    }
    let client = TcpStream::from_std(descriptor.into())?;
    client.set_nodelay(true)?;
    Ok(Client::Tcp(client))
}

async fn first_read(stream: &UnixStream) -> io::Result<(Bytes, Option<OwnedFd>)> {
    stream
        .async_io(Interest::READABLE, || {
            let mut data = BytesMut::zeroed(4096);
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(stream, &mut [IoSliceMut::new(&mut data)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
            data.truncate(received.bytes);
            let mut descriptor = None;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    descriptor = descriptors.last();
                }
            }
            Ok((data.freeze(), descriptor))
        })
        .await
}

/// The bytes that noded had read from the client; `first` is the message's beginning.
async fn read_prefix(mut stream: UnixStream, first: Bytes) -> io::Result<Bytes> {
    let mut message = BytesMut::from(&first[1..]);
    while message.len() < 4 {
        if stream.read_buf(&mut message).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let head = message.split_to(4);
    let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if length > PREFIX_LIMIT_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the handed over beginning is too long"));
    }
    while message.len() < length {
        if stream.read_buf(&mut message).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    message.truncate(length);
    Ok(message.freeze())
}
