//! One side of a TLS 1.3 connection in which both sides have certificates with a SPIFFE ID. A server writes the ID of each
//! client to it and closes the connection; a client prints the ID of the server and what that writes.
//!
//!     rustls-peer server 0 ROOTS CHAIN KEY       prints "listening PORT"
//!     rustls-peer client PORT ROOTS CHAIN KEY

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{aws_lc_rs, verify_tls13_signature, CryptoProvider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, ServerConfig, ServerConnection};
use rustls::{SignatureScheme, StreamOwned};

/// Any server of the roots, as rustls has no verifier for names that are URIs.
#[derive(Debug)]
struct AnyID(RootCertStore, Arc<CryptoProvider>);

impl ServerCertVerifier for AnyID {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let algorithms = self.1.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&ParsedCertificate::try_from(leaf)?, &self.0, others, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, signature, &self.1.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.1.signature_verification_algorithms.supported_schemes()
    }
}

/// The URI of a certificate: a general name with the tag 6.
fn id(chain: Option<&[CertificateDer<'_>]>) -> String {
    let der = chain.map_or(&[][..], |c| &c[0]);
    let at = der.windows(9).position(|w| w == b"spiffe://");
    let Some(at) = at else { return "none".into() };
    String::from_utf8_lossy(&der[at..at + der[at - 1] as usize]).into_owned()
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, side, port, roots, chain, key] = &args[..] else { return Err("want SIDE PORT ROOTS CHAIN KEY".into()) };
    let chain = CertificateDer::pem_file_iter(chain)?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(key)?;
    let mut store = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(roots)? {
        store.add(root?)?;
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    if side == "client" {
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyID(store, provider)))
            .with_client_auth_cert(chain, key)?;
        let below = TcpStream::connect(("127.0.0.1", port.parse()?))?;
        let connection = ClientConnection::new(Arc::new(config), ServerName::from(std::net::Ipv4Addr::LOCALHOST))?;
        let mut tls = StreamOwned::new(connection, below);
        let mut text = String::new();
        tls.read_to_string(&mut text)?;
        println!("{} {}", id(tls.conn.peer_certificates()), text);
        return Ok(());
    }
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider.clone()).build()?;
    let config = Arc::new(
        ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain, key)?,
    );
    let listener = TcpListener::bind(("127.0.0.1", port.parse()?))?;
    println!("listening {}", listener.local_addr()?.port());
    for below in listener.incoming() {
        let mut tls = StreamOwned::new(ServerConnection::new(config.clone())?, below?);
        if let Err(e) = answer(&mut tls) {
            eprintln!("refused: {e}");
        }
    }
    Ok(())
}

fn answer(tls: &mut StreamOwned<ServerConnection, TcpStream>) -> Result<(), Box<dyn Error>> {
    while tls.conn.is_handshaking() {
        tls.conn.complete_io(&mut tls.sock)?;
    }
    tls.write_all(id(tls.conn.peer_certificates()).as_bytes())?;
    tls.conn.send_close_notify();
    tls.flush()?;
    Ok(())
}
