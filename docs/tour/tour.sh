sandmill run 'echo "hello from $(hostname), uid $(id -u)"; ip -brief address'
box=$(sandmill create --memory-mb 256 --lease 600); echo "$box" | tee /tmp/box
sandmill exec $(cat /tmp/box) 'echo "print(6 * 7)" > /tmp/a.py'
sandmill exec $(cat /tmp/box) -- python3 /tmp/a.py
sandmill exec --timeout 0.5 $(cat /tmp/box) 'echo so far; setsid sleep 1000 & sleep 1000'; echo "exit $?"
sandmill exec $(cat /tmp/box) 'python3 -c "x = bytearray(1 << 30)"'; echo "exit $?"
sandmill ls
sandmill kill $(cat /tmp/box)
