//! An image in a registry, read as any other source of OCI images.

use std::{
    future::Future,
    io::{self, Read},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{header::CONTENT_RANGE, StatusCode};
use reqwest::Response;
use sha2::{Digest as _, Sha256};
use tokio::{runtime::Handle, sync::watch};

use super::{
    client::{chain, Client, Get},
    credentials::{self, Credentials},
    endpoints::{endpoints, Endpoint},
    progress::Progress,
    pulls::Work,
    refusal::{Kind, Refusal},
    Reference,
};
use crate::images::{
    layers::{hex, DIGEST_PREFIX},
    source::oci::Blobs,
    Error, Result,
};

const DOCUMENTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
const ANYTHING: &str = "*/*";
/// Manifests are small documents; more is refused by who reads them.
const MAX_MANIFEST_BYTES: usize = 8 << 20;
/// How often in a row a download may be cut without a byte in between.
const CUTS: u32 = 5;
const CUT_WAIT: Duration = Duration::from_millis(300);

/// One image, from the first of its places that has it. Its calls block: not for threads of the event loop.
pub struct Source {
    client: Arc<Client>,
    runtime: Handle,
    reference: Reference,
    places: Vec<(Endpoint, Option<Credentials>)>,
    cancelled: watch::Receiver<bool>,
    progress: Arc<Progress>,
    /// The refusal behind an `io::Error`, which is all that a reader can give.
    refusal: Mutex<Option<Refusal>>,
}

impl Source {
    /// The call's credentials are for the registry itself and not for its mirrors. `registries`: a `registries.conf`.
    pub fn open(client: Arc<Client>, work: Work, registries: Option<&Path>) -> Result<Self> {
        let Work { reference, credentials: given, progress, cancelled } = work;
        let mut places = Vec::new();
        for endpoint in endpoints(&reference, registries)? {
            let own = given.clone().filter(|_| endpoint.account == reference.registry());
            let credentials = match own {
                Some(own) => Some(own),
                None => credentials::stored(&endpoint.account)?,
            };
            places.push((endpoint, credentials));
        }
        let (runtime, refusal) = (Handle::current(), Mutex::default());
        Ok(Self { client, runtime, reference, places, cancelled, progress, refusal })
    }

    /// The refusal that made a reader fail, if one did.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for `work`, unless nobody waits for us any more.
    fn wait<T>(&self, work: impl Future<Output = std::result::Result<T, Refusal>>) -> std::result::Result<T, Refusal> {
        let mut cancelled = self.cancelled.clone();
        self.runtime.block_on(async {
            tokio::select! {
                done = work => done,
                _ = cancelled.wait_for(|cancelled| *cancelled) => {
                    Err(Refusal::new(Kind::Cancelled, format!("{}: nobody waits for it any more", self.reference)))
                }
            }
        })
    }

    /// Asks one place after the other. The last one's refusal counts, unless an earlier one says more.
    fn get(&self, path: &str, accept: &str, from_byte: u64) -> std::result::Result<Response, Refusal> {
        let mut refusals: Vec<Refusal> = Vec::new();
        for (number, (endpoint, credentials)) in self.places.iter().enumerate() {
            let is_last = number + 1 == self.places.len();
            let get = Get { from_byte, ..Get::new(path, accept, is_last) };
            match self.wait(self.client.get(endpoint, credentials.as_ref(), get)) {
                Ok(response) => return Ok(response),
                Err(refusal) if refusal.kind == Kind::Cancelled => return Err(refusal),
                Err(refusal) => refusals.push(refusal),
            }
        }
        let last = refusals.pop().expect("there is at least one place");
        let earlier: Vec<String> = refusals.iter().map(|refusal| format!("; a mirror: {refusal}")).collect();
        Err(Refusal::new(last.kind, format!("{last}{}", earlier.concat())))
    }

    /// A small document, whole.
    fn document(&self, path: &str, digest: Option<&str>) -> std::result::Result<Vec<u8>, Refusal> {
        let response = self.get(path, DOCUMENTS, 0)?;
        let promised = response.headers().get("docker-content-digest").and_then(|value| value.to_str().ok());
        let promised = digest.or(promised).map(str::to_owned);
        let text = self.wait(async {
            let mut text = Vec::new();
            let mut response = response;
            while let Some(chunk) = response.chunk().await.map_err(|error| cut(path, &error))? {
                text.extend_from_slice(&chunk);
                if text.len() > MAX_MANIFEST_BYTES {
                    return Err(Refusal::new(Kind::Protocol, format!("{path}: larger than any manifest")));
                }
            }
            Ok(text)
        })?;
        let found = format!("{DIGEST_PREFIX}{}", hex(&Sha256::digest(&text)));
        match promised {
            Some(expected) if expected.starts_with(DIGEST_PREFIX) && expected != found => {
                Err(Refusal::new(Kind::Protocol, format!("{path}: its digest is {found}, but {expected} was promised")))
            }
            _ => Ok(text),
        }
    }

    fn remember(&self, refusal: Refusal) -> io::Error {
        let error = io::Error::other(refusal.clone());
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(refusal);
        error
    }
}

impl Blobs for Source {
    fn index(&self) -> Result<Box<dyn Read + Send + '_>> {
        let path = format!("manifests/{}", self.reference.version());
        let text = self.document(&path, self.reference.digest()).map_err(Error::Registry)?;
        Ok(Box::new(io::Cursor::new(text)))
    }

    fn manifest(&self, digest: &str) -> Result<Box<dyn Read + Send + '_>> {
        let text = self.document(&format!("manifests/{digest}"), Some(digest)).map_err(Error::Registry)?;
        Ok(Box::new(io::Cursor::new(text)))
    }

    fn blob(&self, digest: &str) -> Result<Box<dyn Read + Send + '_>> {
        let path = format!("blobs/{digest}");
        let mut download =
            Download { source: self, digest: digest.to_owned(), path, at: 0, response: None, chunk: Bytes::new() };
        // The first request is made now: what a registry refuses is no unreadable file.
        download.connect().map_err(Error::Registry)?;
        Ok(Box::new(download))
    }

    fn label(&self) -> String {
        self.reference.to_string()
    }

    fn expect(&self, layers: &[(&str, u64)]) {
        self.progress.expect(layers);
    }

    fn done(&self, digest: &str) {
        self.progress.done(digest);
    }
}

/// A blob on its way; goes on where it was when the connection is cut.
struct Download<'a> {
    source: &'a Source,
    digest: String,
    path: String,
    at: u64,
    response: Option<Response>,
    chunk: Bytes,
}

impl Download<'_> {
    fn connect(&mut self) -> std::result::Result<(), Refusal> {
        let response = self.source.get(&self.path, ANYTHING, self.at)?;
        let mut skip = self.at;
        if self.at > 0 && response.status() == StatusCode::PARTIAL_CONTENT {
            let begins = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
            let begins: Option<u64> =
                begins.and_then(|text| text.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
            match begins {
                Some(begins) if begins <= self.at => skip = self.at - begins,
                _ => {
                    return Err(Refusal::new(
                        Kind::Protocol,
                        format!("{}: not the range that was asked for", self.path),
                    ))
                }
            }
        }
        self.response = Some(response);
        while skip > 0 {
            // A server that knows no ranges sends all of it again.
            let Some(chunk) = self.next()? else {
                return Err(Refusal::new(Kind::Protocol, format!("{}: shorter than before", self.path)));
            };
            let passed = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
            skip -= passed as u64;
            self.chunk = chunk.slice(passed..);
        }
        Ok(())
    }

    /// The next piece; None at the end, which only the length of the answer knows.
    fn next(&mut self) -> std::result::Result<Option<Bytes>, Refusal> {
        let Some(response) = &mut self.response else { return Ok(None) };
        let path = &self.path;
        self.source.wait(async { response.chunk().await.map_err(|error| cut(path, &error)) })
    }

    fn refill(&mut self) -> std::result::Result<(), Refusal> {
        let mut cuts = 0;
        loop {
            let outcome = match self.response {
                Some(_) => self.next(),
                None => self.connect().map(|()| Some(std::mem::take(&mut self.chunk))),
            };
            match outcome {
                Ok(Some(chunk)) if chunk.is_empty() => {}
                Ok(Some(chunk)) => {
                    self.chunk = chunk;
                    return Ok(());
                }
                Ok(None) => return Ok(()),
                Err(refusal) => {
                    self.response = None;
                    cuts += 1;
                    if !matches!(refusal.kind, Kind::Unavailable | Kind::Unreachable) || cuts > CUTS {
                        return Err(refusal);
                    }
                    let pause = CUT_WAIT * cuts;
                    self.source.wait(async {
                        tokio::time::sleep(pause).await;
                        Ok(())
                    })?;
                }
            }
        }
    }
}

impl Read for Download<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.chunk.is_empty() {
            self.refill().map_err(|refusal| self.source.remember(refusal))?;
        }
        let count = buf.len().min(self.chunk.len());
        buf[..count].copy_from_slice(&self.chunk.split_to(count));
        self.at += count as u64;
        self.source.progress.read(&self.digest, count as u64);
        Ok(count)
    }
}

fn cut(path: &str, error: &reqwest::Error) -> Refusal {
    Refusal::new(Kind::Unavailable, format!("{path}: the connection was cut: {}", chain(error)))
}
