//! Decodes, encodes and inspects Mooncake's structured objects in the dump format of the tests.
//!
//! ```text
//! rollout decode  --objects DUMP (--ref REF.json [--layout flat|envelope] | --manifest KEY)
//! rollout encode  --decoded FILE.json --out DUMP [--out-ref REF.json] [--like REF.json]
//!                 [--schema slime|miles|slime-mooncake|FILE.json] [--prefix P] [--namespace N]
//!                 [--partition P] [--stage S] [--chunk-bytes N] [--first-id HEX]
//! rollout inspect --objects DUMP --ref REF.json
//! ```

use std::{collections::HashMap, error::Error, fs};

use rollout_codec::{
    Schema, Value,
    commands::{self, EncodeOptions},
    json::{self, Style},
    mooncake::{Dump, Reference},
    notation::Layout,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let command = args.next().ok_or("which command? decode, encode or inspect")?;
    let mut flags = HashMap::new();
    while let Some(flag) = args.next() {
        let name = flag.strip_prefix("--").ok_or_else(|| format!("unexpected {flag}"))?.to_owned();
        let value = args.next().ok_or_else(|| format!("--{name} needs a value"))?;
        flags.insert(name, value);
    }
    let flags = Flags(flags);
    match command.as_str() {
        "decode" => decode(&flags),
        "encode" => encode(&flags),
        "inspect" => {
            let about = commands::inspect(&flags.dump()?, &flags.reference("ref")?)?;
            print(&about)
        }
        other => Err(format!("unknown command {other}").into()),
    }
}

struct Flags(HashMap<String, String>);

impl Flags {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn need(&self, name: &str) -> Result<&str> {
        self.get(name).ok_or_else(|| format!("--{name} is needed").into())
    }

    fn dump(&self) -> Result<Dump> {
        Ok(Dump::parse(&fs::read_to_string(self.need("objects")?)?)?)
    }

    fn reference(&self, name: &str) -> Result<Reference> {
        Ok(Reference::parse(&fs::read(self.need(name)?)?)?)
    }
}

fn print(value: &Value) -> Result<()> {
    println!("{}", json::write(value, Style::PRETTY)?);
    Ok(())
}

fn decode(flags: &Flags) -> Result<()> {
    let objects = flags.dump()?;
    if let Some(key) = flags.get("manifest") {
        return print(&commands::decode_members(&objects, key)?);
    }
    let layout = match flags.get("layout").unwrap_or("flat") {
        "flat" => Layout::Flat,
        "envelope" => Layout::Envelope,
        other => return Err(format!("unknown layout {other}").into()),
    };
    print(&commands::decode(&objects, &flags.reference("ref")?, layout)?)
}

fn encode(flags: &Flags) -> Result<()> {
    let mut options = EncodeOptions::default();
    let set = |name: &str, to: &mut String| {
        if let Some(value) = flags.get(name) {
            value.clone_into(to);
        }
    };
    set("prefix", &mut options.prefix);
    set("namespace", &mut options.place.namespace);
    set("partition", &mut options.place.partition);
    set("stage", &mut options.place.stage);
    if let Some(bytes) = flags.get("chunk-bytes") {
        options.chunk_bytes = bytes.parse()?;
    }
    if let Some(id) = flags.get("first-id") {
        options.first_id = Some(u128::from_str_radix(id, 16)?);
    }
    if flags.get("like").is_some() {
        options.like = Some(flags.reference("like")?);
    }
    options.schema = match flags.get("schema") {
        None => Schema::new(),
        Some("slime") => Schema::slime(),
        Some("miles") => Schema::miles(),
        Some("slime-mooncake") => Schema::slime_mooncake(),
        Some(file) => Schema::from_value(&json::parse(&fs::read(file)?)?)?,
    };
    let decoded = json::parse(&fs::read(flags.need("decoded")?)?)?;
    let (dump, reference) = commands::encode(&decoded, &options)?;
    fs::write(flags.need("out")?, dump.to_text()?)?;
    if let Some(reference) = reference {
        let text = reference.to_json(Style::PRETTY)?;
        match flags.get("out-ref") {
            Some(file) => fs::write(file, text)?,
            None => println!("{text}"),
        }
    }
    Ok(())
}
