//! A real Prometheus in a process of its own, and its HTTP API.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Prometheus takes a second or two to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// A line of figures.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its labels, an object.
    pub labels: Value,
    /// Unix times and figures.
    pub points: Vec<(f64, f64)>,
}

/// Ends with this.
#[derive(Debug)]
pub struct Prometheus {
    process: Child,
    address: SocketAddr,
    folder: TempDir,
}

impl Prometheus {
    /// Starts one that scrapes `target` and evaluates these rules, both every second; `None` where it is not installed.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(target: SocketAddr, rules: &Path) -> Option<Self> {
        Self::start_on(&[target], rules)
    }

    /// The same with several targets.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start_on(targets: &[SocketAddr], rules: &Path) -> Option<Self> {
        let targets: Vec<String> = targets.iter().map(|target| format!("\"{target}\"")).collect();
        let targets = targets.join(", ");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
             rule_files: [ \"{}\" ]\n\
             scrape_configs:\n- job_name: vmm-dedup\n  static_configs: [ {{ targets: [ {targets} ] }} ]\n",
            rules.display()
        );
        std::fs::write(&config, text).expect("a configuration");
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|l| l.local_addr());
        let address = free.expect("a free port");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let spawned = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let process = spawned.ok()?;
        let mut prometheus = Self {
            process,
            address,
            folder,
        };
        prometheus.wait_until_ready();
        Some(prometheus)
    }

    fn wait_until_ready(&mut self) {
        let start = Instant::now();
        while self.get("/-/ready").is_none() {
            let ended = self.process.try_wait().expect("a status");
            if ended.is_some() || start.elapsed() > PATIENCE {
                let log = std::fs::read_to_string(self.folder.path().join("log"));
                panic!("Prometheus does not start: {}", log.unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The values of an expression's result now; `Err` with Prometheus' message if it does not parse.
    ///
    /// # Errors
    /// What Prometheus says is wrong with the expression.
    ///
    /// # Panics
    /// If Prometheus does not answer.
    pub fn query(&self, expression: &str) -> Result<Vec<f64>, String> {
        let answer = self.api(&format!("query?query={}", escape(expression)))?;
        let result = answer["result"].as_array().expect("a vector");
        let value = |sample: &Value| sample["value"][1].as_str()?.parse().ok();
        Ok(result.iter().filter_map(value).collect())
    }

    /// An expression's result over some seconds of Unix time, second by second.
    ///
    /// # Errors
    /// What Prometheus says is wrong with the expression.
    ///
    /// # Panics
    /// If Prometheus does not answer.
    pub fn query_range(&self, expression: &str, time: Range<f64>) -> Result<Vec<Series>, String> {
        let (expression, Range { start, end }) = (escape(expression), time);
        let what = format!("query_range?query={expression}&start={start}&end={end}&step=1");
        let answer = self.api(&what)?;
        let point = |sample: &Value| Some((sample[0].as_f64()?, sample[1].as_str()?.parse().ok()?));
        let series = |result: &Value| {
            let values = result["values"].as_array().expect("a matrix");
            Series {
                labels: result["metric"].clone(),
                points: values.iter().filter_map(point).collect(),
            }
        };
        Ok(answer["result"]
            .as_array()
            .expect("a matrix")
            .iter()
            .map(series)
            .collect())
    }

    /// The rules that it has loaded: groups, as its API shows them.
    ///
    /// # Panics
    /// If Prometheus does not answer.
    #[must_use]
    pub fn rules(&self) -> Vec<Value> {
        let groups = self.api("rules").expect("the rules")["groups"].take();
        let rules = groups.as_array().expect("groups").iter();
        rules
            .flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default())
            .collect()
    }

    /// The alerts that fire now, by name.
    ///
    /// # Panics
    /// If Prometheus does not answer.
    #[must_use]
    pub fn firing(&self) -> Vec<String> {
        let answer = self.api("alerts").expect("the alerts");
        let alerts = answer["alerts"].as_array().expect("alerts").iter();
        let firing = alerts.filter(|alert| alert["state"] == "firing");
        let names = firing.filter_map(|alert| alert["labels"]["alertname"].as_str());
        names.map(str::to_owned).collect()
    }

    fn api(&self, what: &str) -> Result<Value, String> {
        let body = self.get(&format!("/api/v1/{what}")).expect("Prometheus answers");
        let mut answer: Value = serde_json::from_str(&body).expect("JSON");
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"].take()),
            _ => Err(answer["error"].to_string()),
        }
    }

    /// The body of an answer; `None` if there is none, or the server is not ready.
    fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        // HTTP/1.0: the body is not chunked and ends with the connection.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        (!head.contains(" 503 ")).then(|| body.to_owned())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// As a part of a URL.
fn escape(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    let escaped = text.bytes().map(|b| match plain(b) {
        true => char::from(b).to_string(),
        false => format!("%{b:02X}"),
    });
    escaped.collect()
}
