//! One GET after the other from registries: scheme, tokens, tries again, and what a refusal means.
//!
//! The protocol is the OCI distribution specification's; tokens are Docker's (`Bearer` challenges). Of it only reading is
//! here.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use http::{
    header::{ACCEPT, AUTHORIZATION, RANGE, RETRY_AFTER, WWW_AUTHENTICATE},
    StatusCode,
};
use reqwest::Response;
use serde::Deserialize;

use super::{
    credentials::Credentials,
    endpoints::Endpoint,
    refusal::{Kind, Refusal},
};

/// How often a request is tried in all.
const TRIES: u32 = 6;
/// First wait between two tries; each next one is twice as long, and half of each is random.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Longest wait that a registry may ask for before it is an error: whoever waits for a sandbox should know.
const LONGEST_ASKED_WAIT: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(15);
/// Silence after which a connection counts as cut.
const SILENCE: Duration = Duration::from_secs(30);
/// What is said of a registry's error page.
const EXCERPT_CHARACTERS: usize = 300;
/// How much earlier than it ends a token is renewed.
const TOKEN_MARGIN: Duration = Duration::from_secs(10);
/// Life of a token that says nothing of it, as Docker has it.
const TOKEN_LIFE: Duration = Duration::from_secs(60);

/// Connections to registries, and what was learnt about them.
pub struct Client {
    strict: reqwest::Client,
    /// Takes any certificate: for endpoints that are called insecure.
    lax: reqwest::Client,
    tokens: Mutex<HashMap<TokenKey, (String, Instant)>>,
    /// Insecure hosts that answer on plain HTTP only.
    plain: Mutex<HashMap<String, bool>>,
}

/// Host, repository, and whose it is.
type TokenKey = (String, String, Option<Credentials>);

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Get<'a> {
    /// Below `/v2/REPOSITORY/`.
    pub path: &'a str,
    pub accept: &'a str,
    /// First byte wanted.
    pub from_byte: u64,
    /// Tries, at most: fewer for a mirror, since there is another place to ask.
    pub tries: u32,
}

impl<'a> Get<'a> {
    pub fn new(path: &'a str, accept: &'a str, is_last: bool) -> Self {
        Self { path, accept, from_byte: 0, tries: if is_last { TRIES } else { 2 } }
    }
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

/// A failed try.
enum Failure {
    Final(Refusal),
    /// Another try may go well; after this long, if the registry said so.
    Passing(Refusal, Option<Duration>),
}

impl Client {
    /// Errors: no usable TLS on this machine.
    pub fn new() -> Result<Self, Refusal> {
        // Fails when another part of the process has chosen one: that will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = |lax: bool| {
            reqwest::Client::builder()
                .user_agent(concat!("sandmill/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECT)
                .read_timeout(SILENCE)
                .tls_danger_accept_invalid_certs(lax)
                .build()
                .map_err(|error| Refusal::new(Kind::Unavailable, format!("TLS on this machine: {}", chain(&error))))
        };
        Ok(Self { strict: client(false)?, lax: client(true)?, tokens: Mutex::default(), plain: Mutex::default() })
    }

    /// The answer to `get`, with a good status, as often tried as `get` says.
    pub async fn get(
        &self,
        endpoint: &Endpoint,
        credentials: Option<&Credentials>,
        get: Get<'_>,
    ) -> Result<Response, Refusal> {
        let mut wait = FIRST_WAIT;
        let mut tried = 0;
        loop {
            let (refusal, asked) = match self.attempt(endpoint, credentials, get).await {
                Ok(response) => return Ok(response),
                Err(Failure::Final(refusal)) => return Err(refusal),
                Err(Failure::Passing(refusal, asked)) => (refusal, asked),
            };
            // Where nobody listens, few tries show whether somebody is just being started.
            tried += if refusal.kind == Kind::Unreachable { 2 } else { 1 };
            if tried >= get.tries || asked.is_some_and(|asked| asked > LONGEST_ASKED_WAIT) {
                return Err(refusal);
            }
            tokio::time::sleep(asked.unwrap_or_else(|| jittered(wait))).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// One try, with a new token if the registry asks for one.
    async fn attempt(
        &self,
        endpoint: &Endpoint,
        credentials: Option<&Credentials>,
        get: Get<'_>,
    ) -> Result<Response, Failure> {
        let key: TokenKey = (endpoint.host.clone(), endpoint.repository.clone(), credentials.cloned());
        let known = lock(&self.tokens).get(&key).filter(|(_, ends)| *ends > Instant::now()).map(|(it, _)| it.clone());
        let response = self.send(endpoint, get, known.as_deref()).await?;
        let response = if response.status() == StatusCode::UNAUTHORIZED {
            lock(&self.tokens).remove(&key);
            let (authorization, life) = self.authorize(endpoint, credentials, &response).await?;
            lock(&self.tokens).insert(key, (authorization.clone(), Instant::now() + life));
            self.send(endpoint, get, Some(&authorization)).await?
        } else {
            response
        };
        judge(response, &format!("{}/{} {}", endpoint.account, endpoint.repository, get.path)).await
    }

    /// Sends one request; for an insecure host by plain HTTP if it doesn't speak TLS.
    async fn send(&self, endpoint: &Endpoint, get: Get<'_>, authorization: Option<&str>) -> Result<Response, Failure> {
        let known = lock(&self.plain).get(&endpoint.host).copied();
        let schemes: &[&str] = match (endpoint.insecure, known) {
            (false, _) => &["https"],
            (true, Some(false)) => &["https"],
            (true, Some(true)) => &["http"],
            (true, None) => &["https", "http"],
        };
        let client = if endpoint.insecure { &self.lax } else { &self.strict };
        let mut failed = None;
        for scheme in schemes {
            let url = format!("{scheme}://{}/v2/{}/{}", endpoint.host, endpoint.repository, get.path);
            let mut request = client.get(&url).header(ACCEPT, get.accept);
            if let Some(authorization) = authorization {
                request = request.header(AUTHORIZATION, authorization);
            }
            if get.from_byte > 0 {
                request = request.header(RANGE, format!("bytes={}-", get.from_byte));
            }
            match request.send().await {
                Ok(response) => {
                    if endpoint.insecure && known.is_none() {
                        lock(&self.plain).insert(endpoint.host.clone(), *scheme == "http");
                    }
                    return Ok(response);
                }
                Err(error) => failed = Some((url, error)),
            }
        }
        let (url, error) = failed.expect("at least one scheme was tried");
        Err(unreachable(&url, &error))
    }

    /// What to put into `Authorization` after a 401, and for how long it is good.
    async fn authorize(
        &self,
        endpoint: &Endpoint,
        credentials: Option<&Credentials>,
        refused: &Response,
    ) -> Result<(String, Duration), Failure> {
        let who = &endpoint.account;
        let auth = |message: String| Failure::Final(Refusal::new(Kind::Auth, message));
        let header = refused.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let challenges = http_auth::parse_challenges(header)
            .map_err(|_| auth(format!("{who} refuses the request and says no way to log in")))?;
        let find = |scheme: &str| challenges.iter().find(|one| one.scheme.eq_ignore_ascii_case(scheme));
        if let Some(challenge) = find("bearer") {
            let parameter = |name: &str| {
                let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
                found.map(|(_, value)| value.to_unescaped())
            };
            let realm = parameter("realm").ok_or_else(|| auth(format!("{who} asks for a token of nobody")))?;
            return self.token(endpoint, credentials, &realm, parameter("service"), parameter("scope")).await;
        }
        let basic = credentials.and_then(Credentials::basic);
        match (find("basic"), basic) {
            // Good until it is refused.
            (Some(_), Some(basic)) => Ok((basic, Duration::from_secs(3600))),
            (Some(_), None) => Err(auth(format!("{who} wants a user name and a password"))),
            (None, _) => Err(auth(format!("{who} wants a way of logging in that is not known here: {header}"))),
        }
    }

    async fn token(
        &self,
        endpoint: &Endpoint,
        credentials: Option<&Credentials>,
        realm: &str,
        service: Option<String>,
        scope: Option<String>,
    ) -> Result<(String, Duration), Failure> {
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", endpoint.repository));
        let client = if endpoint.insecure { &self.lax } else { &self.strict };
        let who = &endpoint.account;
        if credentials.is_some() && !endpoint.insecure && !realm.starts_with("https://") {
            let message = format!("{who} wants the credentials sent to {realm}, which is not encrypted");
            return Err(Failure::Final(Refusal::new(Kind::Auth, message)));
        }
        let mut fields = vec![("scope", scope)];
        fields.extend(service.map(|service| ("service", service)));
        let request = match credentials {
            Some(Credentials::Identity { identity_token }) => {
                fields.push(("grant_type", "refresh_token".to_owned()));
                fields.push(("client_id", "sandmill".to_owned()));
                fields.push(("refresh_token", identity_token.clone()));
                client.post(realm).form(&fields)
            }
            other => {
                let request = client.get(realm).query(&fields);
                match other.and_then(Credentials::basic) {
                    Some(basic) => request.header(AUTHORIZATION, basic),
                    None => request,
                }
            }
        };
        let response = request.send().await.map_err(|error| unreachable(realm, &error))?;
        let response = judge(response, &format!("a token for {who}/{}", endpoint.repository)).await?;
        let text = response.bytes().await.map_err(|error| unreachable(realm, &error))?;
        let parsed: Option<Token> = serde_json::from_slice(&text).ok();
        let life = parsed.as_ref().and_then(|token| token.expires_in).map_or(TOKEN_LIFE, Duration::from_secs);
        match parsed.and_then(|token| token.token.or(token.access_token)) {
            Some(token) => Ok((format!("Bearer {token}"), life.saturating_sub(TOKEN_MARGIN))),
            None => Err(Failure::Final(Refusal::new(Kind::Protocol, format!("{realm} gave no token for {who}")))),
        }
    }
}

/// A good answer, or what the status means.
async fn judge(response: Response, what: &str) -> Result<Response, Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let asked = retry_after(&response);
    let text = response.text().await.unwrap_or_default();
    let said: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(EXCERPT_CHARACTERS).collect();
    let message = format!("{what}: the registry answered {status}{}{said}", if said.is_empty() { "" } else { ": " });
    Err(match status {
        StatusCode::NOT_FOUND => Failure::Final(Refusal::new(Kind::NotFound, message)),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::Final(Refusal::new(Kind::Auth, message)),
        StatusCode::TOO_MANY_REQUESTS => Failure::Passing(Refusal::new(Kind::RateLimited(asked), message), asked),
        StatusCode::REQUEST_TIMEOUT => Failure::Passing(Refusal::new(Kind::Unavailable, message), asked),
        status if status.is_server_error() => Failure::Passing(Refusal::new(Kind::Unavailable, message), asked),
        _ => Failure::Final(Refusal::new(Kind::Protocol, message)),
    })
}

/// `Retry-After`, in seconds or as a date.
fn retry_after(response: &Response) -> Option<Duration> {
    let value = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    match value.trim().parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => {
            httpdate::parse_http_date(value).ok().map(|at| at.duration_since(SystemTime::now()).unwrap_or_default())
        }
    }
}

fn unreachable(url: &str, error: &reqwest::Error) -> Failure {
    let kind = if error.is_connect() { Kind::Unreachable } else { Kind::Unavailable };
    Failure::Passing(Refusal::new(kind, format!("{url}: {}", chain(error))), None)
}

/// An error with its causes, without the URL that reqwest repeats in each.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let said = error.to_string();
        let said = said.split(" for url (").next().unwrap_or_default();
        if !text.ends_with(said) {
            text = if text.is_empty() { said.to_owned() } else { format!("{text}: {said}") };
        }
        next = error.source();
    }
    text
}

fn jittered(wait: Duration) -> Duration {
    let mut byte = [0_u8; 1];
    let _ = rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::empty());
    wait / 2 + wait.mul_f64(f64::from(byte[0]) / 512.0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
