//! The few rtnetlink requests that a sandbox's network needs, spoken directly: each is one message and one answer.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::net::{
    netdevice, recv, send, socket_with, sockopt, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
};

/// The kernel answers at once, or after whoever else holds its one lock for links.
const ANSWER: Duration = Duration::from_secs(10);

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const HEADER_BYTES: usize = 16;

const VETH_INFO_PEER: u16 = 1;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;
const NUD_PERMANENT: u16 = 0x80;
const IFF_UP: u32 = 1;

pub type Mac = [u8; 6];

/// A socket that speaks to the kernel about the network namespace in which it was opened.
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// One end of a veth pair.
pub struct End<'a> {
    pub name: &'a str,
    pub mac: Mac,
}

impl Netlink {
    /// About the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        // Protocol 0 is NETLINK_ROUTE.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER))?;
        Ok(Self { socket, sequence: 0 })
    }

    pub fn index(&self, name: &str) -> io::Result<u32> {
        // The ioctl works on a socket of any family.
        Ok(netdevice::name_to_index(&self.socket, name)?)
    }

    /// The largest packet that an interface passes.
    pub fn mtu(&mut self, name: &str) -> io::Result<u32> {
        let mut message = Message::new(libc::RTM_GETLINK, 0);
        message.link_header(0, 0, 0);
        message.text(libc::IFLA_IFNAME, name);
        let answer = self.query(message)?;
        let not_said = || io::Error::from(io::ErrorKind::InvalidData);
        let mut attributes = answer.get(HEADER_BYTES + 16..).ok_or_else(not_said)?;
        while let [l0, l1, k0, k1, rest @ ..] = attributes {
            let length = usize::from(u16::from_ne_bytes([*l0, *l1]));
            if let (libc::IFLA_MTU, Some(value)) = (u16::from_ne_bytes([*k0, *k1]), rest.first_chunk()) {
                return Ok(u32::from_ne_bytes(*value));
            }
            attributes = attributes.get(length.max(4).next_multiple_of(4)..).ok_or_else(not_said)?;
        }
        Err(not_said())
    }

    /// Makes a veth pair; `into` is the network namespace of the peer (ours if absent).
    pub fn add_veth(&mut self, host: &End, peer: &End, mtu: u32, into: Option<BorrowedFd>) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL);
        message.link_header(0, 0, 0);
        message.text(libc::IFLA_IFNAME, host.name);
        message.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
        message.attribute(libc::IFLA_ADDRESS, &host.mac);
        let info = message.open(libc::IFLA_LINKINFO);
        message.text(libc::IFLA_INFO_KIND, "veth");
        let data = message.open(libc::IFLA_INFO_DATA);
        let other = message.open(VETH_INFO_PEER);
        message.link_header(0, 0, 0);
        message.text(libc::IFLA_IFNAME, peer.name);
        message.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
        message.attribute(libc::IFLA_ADDRESS, &peer.mac);
        if let Some(into) = into {
            message.attribute(libc::IFLA_NET_NS_FD, &into.as_fd().as_raw_fd().to_ne_bytes());
        }
        message.close(other);
        message.close(data);
        message.close(info);
        self.ask(message)
    }

    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWLINK, 0);
        message.link_header(index, IFF_UP, IFF_UP);
        self.ask(message)
    }

    /// Removes a link (of a veth pair: both ends). Whether there was one.
    pub fn remove_link(&mut self, name: &str) -> io::Result<bool> {
        let mut message = Message::new(libc::RTM_DELLINK, 0);
        message.link_header(0, 0, 0);
        message.text(libc::IFLA_IFNAME, name);
        match self.ask(message) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub fn add_address(&mut self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE);
        // ifaddrmsg: family, prefix length, flags, scope, index
        message.bytes(&[libc::AF_INET as u8, prefix, 0, RT_SCOPE_UNIVERSE]);
        message.bytes(&index.to_ne_bytes());
        message.attribute(libc::IFA_LOCAL, &address.octets());
        message.attribute(libc::IFA_ADDRESS, &address.octets());
        self.ask(message)
    }

    /// Pins the link-layer address of a neighbour: no ARP, so nothing to spoof.
    pub fn add_neighbour(&mut self, index: u32, address: Ipv4Addr, mac: Mac) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE);
        // ndmsg: family, padding, index, state, flags, type
        message.bytes(&[libc::AF_INET as u8, 0, 0, 0]);
        message.bytes(&index.to_ne_bytes());
        message.bytes(&NUD_PERMANENT.to_ne_bytes());
        message.bytes(&[0, 0]);
        message.attribute(libc::NDA_DST, &address.octets());
        message.attribute(libc::NDA_LLADDR, &mac);
        self.ask(message)
    }

    /// A route to one address that is right at the other end of a link.
    pub fn add_host_route(&mut self, index: u32, to: Ipv4Addr, source: Ipv4Addr) -> io::Result<()> {
        let mut message = Message::route(32, RT_SCOPE_LINK);
        message.attribute(libc::RTA_DST, &to.octets());
        message.attribute(libc::RTA_PREFSRC, &source.octets());
        message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.ask(message)
    }

    pub fn add_default_route(&mut self, index: u32, gateway: Ipv4Addr) -> io::Result<()> {
        let mut message = Message::route(0, RT_SCOPE_UNIVERSE);
        message.attribute(libc::RTA_GATEWAY, &gateway.octets());
        message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.ask(message)
    }

    /// A request that changes something.
    fn ask(&mut self, message: Message) -> io::Result<()> {
        self.query(message).map(drop)
    }

    /// The message that answers; empty for a bare acknowledgement.
    fn query(&mut self, message: Message) -> io::Result<Vec<u8>> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = message.finish(self.sequence);
        send(&self.socket, &bytes, SendFlags::empty())?;
        let mut answer = [0_u8; 16_384];
        let mut said = Vec::new();
        loop {
            let (length, _) = recv(&self.socket, &mut answer[..], RecvFlags::empty())?;
            let field = |at: usize| <[u8; 4]>::try_from(&answer[at..at + 4]).unwrap_or_default();
            if length < HEADER_BYTES + 4 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            // An answer to an earlier request that ran into its deadline.
            if u32::from_ne_bytes(field(8)) != self.sequence {
                continue;
            }
            if u16::from_ne_bytes([answer[4], answer[5]]) != NLMSG_ERROR {
                // What was asked for; the acknowledgement follows.
                said = answer[..length].to_vec();
                continue;
            }
            return match i32::from_ne_bytes(field(HEADER_BYTES)) {
                0 => Ok(said),
                negative => Err(io::Error::from_raw_os_error(-negative)),
            };
        }
    }
}

/// A request under construction.
struct Message(Vec<u8>);

/// Where a nested attribute began.
struct Nested(usize);

impl Message {
    fn new(kind: u16, flags: u16) -> Self {
        let mut message = Self(Vec::with_capacity(256));
        message.bytes(&[0; 4]);
        message.bytes(&kind.to_ne_bytes());
        message.bytes(&(NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
        message.bytes(&[0; 8]);
        message
    }

    fn route(prefix: u8, scope: u8) -> Self {
        let mut message = Self::new(libc::RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE);
        // rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
        message.bytes(&[libc::AF_INET as u8, prefix, 0, 0, libc::RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST]);
        message.bytes(&[0; 4]);
        message
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// ifinfomsg: family, padding, type, index, flags, change
    fn link_header(&mut self, index: u32, flags: u32, change: u32) {
        self.bytes(&[0; 4]);
        self.bytes(&index.to_ne_bytes());
        self.bytes(&flags.to_ne_bytes());
        self.bytes(&change.to_ne_bytes());
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let nested = self.open(kind);
        self.bytes(value);
        self.close(nested);
    }

    fn text(&mut self, kind: u16, value: &str) {
        let nested = self.open(kind);
        self.bytes(value.as_bytes());
        self.bytes(&[0]);
        self.close(nested);
    }

    fn open(&mut self, kind: u16) -> Nested {
        let start = self.0.len();
        self.bytes(&[0, 0]);
        self.bytes(&kind.to_ne_bytes());
        Nested(start)
    }

    fn close(&mut self, Nested(start): Nested) {
        // No request of ours comes near 64 KiB.
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}
