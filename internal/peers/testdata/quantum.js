// One side of a TLS 1.3 connection in which both sides have certificates with a SPIFFE ID. A server writes the ID of each
// client to it and closes the connection; a client prints the ID of the server and what that writes.
//
//     node quantum.js server 0 ROOTS CHAIN KEY...      prints "listening PORT"
//     node quantum.js client PORT ROOTS CHAIN KEY...
'use strict';
const fs = require('node:fs');
const tls = require('node:tls');

const [side, port, ca, ...own] = process.argv.slice(2);
const read = (n) => own.filter((_, i) => i % 2 === n).map((path) => fs.readFileSync(path));
const options = {
  cert: read(0), key: read(1), ca: fs.readFileSync(ca),
  requestCert: true, rejectUnauthorized: true, minVersion: 'TLSv1.3',
};
const id = (socket) => socket.getPeerX509Certificate().subjectAltName.replace(/^URI:/, '');

if (side === 'server') {
  const server = tls.createServer(options, (socket) => {
    socket.on('error', (e) => console.error('refused: ' + e));
    socket.end(id(socket));
  });
  server.on('tlsClientError', (e) => console.error('refused: ' + e));
  server.listen(Number(port), '127.0.0.1', () => console.log('listening ' + server.address().port));
} else {
  // The ID is in a URI, which Node does not compare with the host.
  const socket = tls.connect({...options, host: '127.0.0.1', port: Number(port), checkServerIdentity: () => undefined});
  let text = '';
  let server;
  socket.on('secureConnect', () => { server = id(socket); });
  socket.on('data', (data) => { text += data; });
  socket.on('end', () => console.log(server + ' ' + text));
  socket.on('error', (e) => { console.error('refused: ' + e); process.exitCode = 1; });
}
