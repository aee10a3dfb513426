//! Blocks on a server or in a shared folder, over [opendal](https://docs.rs/opendal).
//!
//! Several processes may share it: equal blocks have equal keys, and a frame is written whole or not at all. The
//! server bounds its size itself (`maxmemory` of Redis, a life cycle rule of S3), so a block may go at any time.
mod unfinished;

use crate::lookups::Lookups;
use crate::{BlockKey, BoxFuture, Bytes, Frame, FrameStore, Framed, Guarded, Limits, StoreError, Usage};
use opendal::services::{FsConfig, RedisConfig, S3Config};
use opendal::{Buffer, Configurator, ErrorKind, HttpTransporter, Operator, OperatorUri};
use opendal_http_transport_reqwest::ReqwestTransport;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Unfinished files of a folder.
const UNFINISHED: &str = ".unfinished";

/// A store on a server, or in a folder.
pub type Remote = Framed<Guarded<RemoteFrames>>;

impl Remote {
    /// Opens the store that a URL names. Does not connect: a server that is down now may be up later.
    ///
    /// - `redis://[USER[:PASSWORD]@]HOST[:PORT][/DB][/PREFIX][?default_ttl=1h]`: Redis or Valkey.
    /// - `s3://BUCKET[/PREFIX][?region=R&endpoint=URL]`: S3 and what speaks its protocol. Credentials are read as by
    ///   other clients: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, `~/.aws`, the machine's role.
    /// - `fs:///PATH`: a folder that several machines mount.
    ///
    /// # Errors
    /// The URL is none of these, or lacks a part.
    pub fn open(url: &str, limits: Limits) -> Result<Remote, StoreError> {
        Ok(Framed::over(Guarded::new(RemoteFrames::open(url, limits.timeout)?, limits)))
    }

    /// Refuses a URL that [`open`](Self::open) refuses. Connects to nothing and makes no folder.
    ///
    /// # Errors
    /// The URL is none of a store, or lacks a part.
    pub fn check(url: &str) -> Result<(), StoreError> {
        match Place::of(url)? {
            Place::Folder(_) => Ok(()),
            server => server.operator().map(|_| ()),
        }
    }
}

/// The frames of [`Remote`].
pub struct RemoteFrames {
    name: &'static str,
    operator: Operator,
    lookups: Lookups,
}

/// Never shows the URL: it may contain a password.
fn refused(problem: impl std::fmt::Display, advice: &str) -> StoreError {
    StoreError::Open { store: "remote store".into(), problem: problem.to_string(), advice: advice.into() }
}

const FORMS: &str = "Write redis://HOST:6379/PREFIX, s3://BUCKET/PREFIX?region=REGION or fs:///PATH";

fn invalid(error: opendal::Error) -> StoreError {
    refused(describe(&error), FORMS)
}

/// What may follow `?` in the URL of a folder, of Redis and of S3: options of opendal, with its other names for them.
const FOLDER_OPTIONS: &[&str] = &[];
const REDIS_OPTIONS: &[&str] = &["connection_pool_max_size", "db", "default_ttl", "password", "username"];
const S3_OPTIONS: &[&str] = &[
    "access_key_id",
    "allow_anonymous",
    "assume_role_duration_seconds",
    "aws_access_key_id",
    "aws_endpoint",
    "aws_endpoint_url",
    "aws_profile",
    "aws_region",
    "aws_secret_access_key",
    "aws_session_token",
    "aws_sse_kms_key_id",
    "checksum_algorithm",
    "default_acl",
    "default_storage_class",
    "disable_config_load",
    "disable_ec2_metadata",
    "enable_request_payer",
    "enable_virtual_host_style",
    "endpoint",
    "endpoint_url",
    "external_id",
    "profile",
    "region",
    "role_arn",
    "role_session_name",
    "secret_access_key",
    "server_side_encryption",
    "server_side_encryption_aws_kms_key_id",
    "server_side_encryption_customer_algorithm",
    "server_side_encryption_customer_key",
    "server_side_encryption_customer_key_md5",
    "session_token",
    "skip_signature",
    "token",
];

/// opendal ignores options that it does not know.
fn check_options(uri: &OperatorUri, known: &[&str]) -> Result<(), StoreError> {
    let mut unknown: Vec<&str> =
        uri.options().keys().map(String::as_str).filter(|key| !known.contains(key)).collect();
    unknown.sort_unstable();
    let Some(unknown) = unknown.first() else { return Ok(()) };
    // What looks like no name may be a part of a password.
    let is_name = unknown.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_');
    let what = if is_name { format!("the unknown option {unknown:?}") } else { "an unknown option".into() };
    let advice = match known {
        [] => "Write no more than fs:///PATH".into(),
        known => format!("After the ? it has {}; a ? in a password is written %3F", known.join(", ")),
    };
    Err(refused(format!("the URL has {what}"), &advice))
}

/// Refuses what opendal takes and cannot use: a pool without connections panics, and Redis counts whole seconds.
fn check_redis(config: &RedisConfig) -> Result<(), StoreError> {
    if config.connection_pool_max_size == Some(0) {
        return Err(refused(
            "connection_pool_max_size is 0",
            "Give it at least 1, or leave it out: then it is 10",
        ));
    }
    if config.default_ttl.is_some_and(|ttl| ttl.as_secs() < 1) {
        let advice = "Give it at least 1s, as in default_ttl=1h, or leave it out: then blocks stay until Redis needs the room";
        return Err(refused("default_ttl is less than a second", advice));
    }
    Ok(())
}

/// Where a store is.
enum Place {
    Redis(RedisConfig),
    S3(Box<S3Config>),
    Folder(FsConfig),
}

impl Place {
    fn of(url: &str) -> Result<Self, StoreError> {
        let uri = OperatorUri::new(url, std::iter::empty::<(String, String)>())
            .map_err(|_| refused("the URL cannot be parsed", FORMS))?;
        Ok(match uri.scheme() {
            "rediss" => {
                return Err(refused(
                    "TLS to Redis is not supported",
                    "Use redis:// over a trusted network or a tunnel",
                ));
            }
            "redis" => {
                check_options(&uri, REDIS_OPTIONS)?;
                let mut config = RedisConfig::from_uri(&uri).map_err(invalid)?;
                config.username =
                    uri.username().filter(|user| !user.is_empty()).map(str::to_owned).or(config.username);
                config.password = uri.password().map(str::to_owned).or(config.password);
                check_redis(&config)?;
                Place::Redis(config)
            }
            "s3" => {
                check_options(&uri, S3_OPTIONS)?;
                Place::S3(Box::new(S3Config::from_uri(&uri).map_err(invalid)?))
            }
            "fs" | "file" => {
                check_options(&uri, FOLDER_OPTIONS)?;
                if let Some(host) = uri.name().filter(|host| !host.is_empty()) {
                    let problem = format!("{host:?} would be a host, and the folder is on none");
                    return Err(refused(problem, "Write three slashes and the whole path: fs:///PATH"));
                }
                let mut config = FsConfig::from_uri(&uri).map_err(invalid)?;
                let Some(root) = config.root.clone() else {
                    return Err(refused("the URL names no folder", FORMS));
                };
                // A file gets its name when it is whole.
                config.atomic_write_dir = Some(format!("{}/{UNFINISHED}", root.trim_end_matches('/')));
                Place::Folder(config)
            }
            other => return Err(refused(format!("no store has the scheme {other:?}"), FORMS)),
        })
    }

    /// Of a store there.
    fn name(&self) -> &'static str {
        match self {
            Place::Redis(_) => "redis",
            Place::S3(_) => "s3",
            Place::Folder(_) => "fs",
        }
    }

    /// Makes a folder that is not there, and removes from one what earlier writes have left.
    fn operator(self) -> Result<Operator, StoreError> {
        match self {
            Place::Redis(config) => Operator::new(config.into_builder()).map_err(invalid),
            Place::S3(config) => with_http(Operator::new(config.into_builder()).map_err(invalid)?),
            Place::Folder(config) => {
                if let Some(folder) = &config.atomic_write_dir {
                    unfinished::remove_abandoned(Path::new(folder), SystemTime::now());
                }
                Operator::new(config.into_builder()).map_err(invalid)
            }
        }
    }
}

impl RemoteFrames {
    fn open(url: &str, timeout: Duration) -> Result<Self, StoreError> {
        let place = Place::of(url)?;
        let (name, operator) = (place.name(), place.operator()?);
        // Waiting for a turn and for answers together take less than the limit of the operation.
        Ok(RemoteFrames { name, operator, lookups: Lookups::new(name, timeout * 9 / 20) })
    }

    fn failed(&self, action: &'static str, error: &opendal::Error) -> StoreError {
        StoreError::Failed { store: self.name.into(), action, problem: describe(error) }
    }

    async fn lookup(&self, keys: &[BlockKey], within: Duration) -> Result<usize, StoreError> {
        let exists = |key: BlockKey| async move {
            let path = path(&key);
            let exists = in_time(|| self.operator.exists(&path)).await;
            exists.map_err(|error| self.failed("look up blocks", &error))
        };
        self.lookups.count(keys, within, exists).await
    }

    async fn read(&self, key: &BlockKey) -> Result<Option<Frame>, StoreError> {
        let path = path(key);
        match in_time(|| self.operator.read(&path)).await {
            Ok(buffer) => Ok(Some(Frame::split(buffer.to_bytes()))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed("read a block", &error)),
        }
    }

    async fn write(&self, key: BlockKey, frame: Frame) -> Result<(), StoreError> {
        let buffer: Buffer = [frame.head, frame.body].into_iter().collect::<Vec<Bytes>>().into();
        let path = path(&key);
        let written = in_time(|| unfinished::write(&self.operator, &path, buffer.clone())).await;
        written.map_err(|error| match is_full(&error) {
            true => {
                let problem = describe(&error);
                StoreError::Full { store: self.name.into(), action: "write a block", problem }
            }
            false => self.failed("write a block", &error),
        })
    }

    async fn delete(&self, key: &BlockKey) -> Result<(), StoreError> {
        let path = path(key);
        let deleted = in_time(|| self.operator.delete(&path)).await;
        deleted.map_err(|error| self.failed("remove a block", &error))
    }
}

/// Repeats what a client gave up, as that of Redis does after half a second, with growing pauses. The caller ends it after the limit of the
/// whole operation. This is for servers and machines that are late for a moment: each attempt begins anew, so a block that needs longer
/// than half a second on its way is never read.
async fn in_time<T, F: Future<Output = opendal::Result<T>>>(
    mut act: impl FnMut() -> F,
) -> opendal::Result<T> {
    let mut pause = Duration::from_millis(50);
    loop {
        match act().await {
            Err(error) if is_late(&error) => {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            done => return done,
        }
    }
}

/// Whether the client has given up. Its error has the text of [`ErrorKind::TimedOut`](std::io::ErrorKind::TimedOut); that of a system has
/// a number after it.
fn is_late(error: &opendal::Error) -> bool {
    describe(error).ends_with(&std::io::Error::from(std::io::ErrorKind::TimedOut).to_string())
}

/// In 256 folders: some file systems are slow with many files in one.
fn path(key: &BlockKey) -> String {
    let name = key.to_string();
    format!("{}/{name}", &name[..2])
}

/// The message and its causes, without the context, which contains URLs.
fn describe(error: &opendal::Error) -> String {
    let mut text = format!("{}: {}", error.kind(), error.message());
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// Whether a server or a file system refused to write because it has no room. A server says so in its own words alone.
fn is_full(error: &opendal::Error) -> bool {
    const WORDS: [&str; 3] = [
        // Redis and Valkey, with `maxmemory-policy noeviction`.
        "command not allowed when used memory > 'maxmemory'",
        // S3 of Ceph (`QuotaExceeded`) and MinIO (`XMinioAdminBucketQuotaExceeded`, `XMinioStorageFull`). S3 of AWS is never full.
        "QuotaExceeded",
        "XMinioStorageFull",
    ];
    let text = describe(error);
    if WORDS.iter().any(|words| text.contains(words)) {
        return true;
    }
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let of_file = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if matches!(of_file, Some(std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        source = cause.source();
    }
    false
}

fn with_http(operator: Operator) -> Result<Operator, StoreError> {
    // Another part of the program may have chosen a provider already; any serves.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().build().map_err(|error| {
        refused(
            format!("cannot prepare TLS: {error}"),
            "Install this system's certificates (Debian: ca-certificates)",
        )
    })?;
    let transport = HttpTransporter::new(ReqwestTransport::new(client));
    let context = operator.context().with_http_transport(transport);
    Ok(operator.with_context(context))
}

impl FrameStore for RemoteFrames {
    fn name(&self) -> &str {
        self.name
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(self.lookup(keys, within))
    }

    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        Box::pin(self.read(key))
    }

    /// The server keeps the frame for as long as its own rules say; the frame knows when it expires.
    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        _ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.write(key, frame))
    }

    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.delete(key))
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn a_store_that_is_full_is_told_from_one_that_fails() {
        let unexpected = |text: &str| opendal::Error::new(ErrorKind::Unexpected, text);
        let of_io = |kind: io::ErrorKind| unexpected("write").set_source(io::Error::from(kind));
        let of_redis = "\"OOM\": command not allowed when used memory > 'maxmemory'.";
        for (error, expected) in [
            (unexpected("response error").set_source(io::Error::other(of_redis)), true),
            (unexpected("S3Error { code: \"QuotaExceeded\", message: \"\" }"), true),
            (unexpected("S3Error { code: \"XMinioAdminBucketQuotaExceeded\", message: \"\" }"), true),
            (of_io(io::ErrorKind::StorageFull), true),
            (of_io(io::ErrorKind::QuotaExceeded), true),
            (of_io(io::ErrorKind::PermissionDenied), false),
            (unexpected("S3Error { code: \"SlowDown\", message: \"\" }"), false),
            (unexpected("response error").set_source(io::Error::other("\"MISCONF\": cannot save")), false),
        ] {
            assert_eq!(is_full(&error), expected, "{error:?}");
        }
    }
}
